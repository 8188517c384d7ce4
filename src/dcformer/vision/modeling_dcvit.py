"""DCViT: a vision Transformer whose attention heads are composed dynamically (arXiv 2405.08553, section 4.4).

The shape of the file is that of Transformers' ViT, whose parameters have the same names here. Composition is the
package's own: `DCFormerCompose` makes the weights from the states that also feed queries, keys and values, and the
attention implementations of the language models mix the heads with them, without causality.
Letters: B batch, T tokens (patches, and the class token in front if there is one), E hidden size, H heads, D head dim.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..arguments_dcformer import refuse_missing_layers, share_of_labels
from ..attention_dcformer import attend_without_autocast, check_trace, eager_attention, refuse_without_composition
from ..compose_dcformer import DCFormerCompose, compose_init_std, init_compose, stages
from ..implementations_dcformer import DEFAULT_ATTENTION, default_implementation
from ..masks_dcformer import has_values
from ..modeling_dcformer import DCFormerPreTrainedModel
from ..stored_dcformer import naming_damage, refuse_head_system, stored_config
from .configuration_dcvit import DCViTConfig, pair

logger = logging.get_logger(__name__)


def sincos_positions(rows: int, columns: int, size: int) -> torch.Tensor:
    """Fixed positions of a grid of patches, in the layout of MoCo v3 (and of big_vision).

    The patch in row y and column x has [sin(x·ω), cos(x·ω), sin(y·ω), cos(y·ω)], where ω_i = 10000^(-i / (size/4 - 1))
    for 0 <= i < size/4.

    Args:
        rows, columns: of the grid.
        size: channels, a multiple of 4 and at least 8.

    Returns:
        [rows·columns, size] in float32, computed in float64; row by row.
    """
    quarter = size // 4
    omega = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
    y = torch.arange(rows, dtype=torch.float64)[:, None, None] * omega  # [rows, 1, size/4]
    x = torch.arange(columns, dtype=torch.float64)[None, :, None] * omega  # [1, columns, size/4]
    parts = [part.expand(rows, columns, quarter) for part in (x.sin(), x.cos(), y.sin(), y.cos())]
    return torch.cat(parts, dim=-1).flatten(0, 1).float()


def _lecun_normal(weight: torch.Tensor) -> None:
    """Flax's default for kernels: of std 1/√(fan in), cut off where the uncut distribution has two of its stds."""
    std = weight[0].numel() ** -0.5 / 0.87962566103423978  # what cutting leaves of a standard normal's std
    init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class DCViTPatchEmbeddings(nn.Module):
    """Cuts images into patches and projects them."""

    def __init__(self, config: DCViTConfig):
        super().__init__()
        self.num_channels, self.patch_size = config.num_channels, pair(config.patch_size)
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, self.patch_size, stride=self.patch_size)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """[B, channels, height, width] -> [B, patches, E], row by row.

        Raises:
            ValueError: on another number of channels, or a size that patches do not divide.
        """
        if pixel_values.ndim != 4 or pixel_values.shape[1] != self.num_channels:
            raise ValueError(
                f"pixel_values of shape {tuple(pixel_values.shape)} do not fit num_channels={self.num_channels}: "
                "expected [batch, channels, height, width]."
            )
        size = tuple(pixel_values.shape[2:])
        if any(pixels % patch for pixels, patch in zip(size, self.patch_size, strict=True)):
            raise ValueError(
                f"images of {size[0]}x{size[1]} pixels cannot be cut into patches of {self.patch_size[0]}x"
                f"{self.patch_size[1]}: crop or resize them to a multiple (the image processor does)."
            )
        return self.projection(pixel_values).flatten(2).transpose(1, 2)


class DCViTEmbeddings(nn.Module):
    """Patches, positions, and the class token if it is what is pooled."""

    cls_token: nn.Parameter | None

    def __init__(self, config: DCViTConfig):
        super().__init__()
        self.image_size, self.grid = pair(config.image_size), config.grid
        self.patch_embeddings = DCViTPatchEmbeddings(config)
        has_cls = config.pooling == "cls"
        self.register_parameter("cls_token", nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if has_cls else None)
        self.is_learned = config.position_embedding_type == "learned"
        if self.is_learned:  # [1, T, E], the class token's first
            self.position_embeddings = nn.Parameter(
                torch.empty(1, self.grid[0] * self.grid[1] + has_cls, config.hidden_size)
            )
        else:  # [1, patches, E]; the class token is nowhere
            table = sincos_positions(*self.grid, config.hidden_size)[None]
            self.register_buffer("position_embeddings", table, persistent=False)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def reset_positions(self) -> None:
        """Sets the positions to what they are at the start."""
        size = self.position_embeddings.shape[-1]
        if self.is_learned:
            init.normal_(self.position_embeddings, std=size**-0.5)
        else:
            init.copy_(self.position_embeddings, sincos_positions(*self.grid, size)[None])

    def _load_from_state_dict(self, *args: Any) -> None:
        """As PyTorch's. Computed positions, which no state dict has, may lie in memory that `to_empty` has made."""
        super()._load_from_state_dict(*args)
        if not self.is_learned:
            self.reset_positions()

    def positions(self, grid: tuple[int, int]) -> torch.Tensor:
        """Positions of the patches of any grid: [1, rows·columns, E], in the dtype of the parameters.

        Those of "sincos2d" are computed, learned ones are interpolated (bicubic), as in Transformers' ViT.
        """
        known = self.position_embeddings[:, -self.grid[0] * self.grid[1] :]
        if not self.is_learned:
            if grid != self.grid:
                known = sincos_positions(*grid, known.shape[-1])[None].to(known)
            return known.to(self.patch_embeddings.projection.weight.dtype)  # which a model is loaded in, unlike buffers
        if grid == self.grid:
            return known
        image = known.unflatten(1, self.grid).permute(0, 3, 1, 2)  # [1, E, rows, columns]
        image = F.interpolate(image, size=grid, mode="bicubic", align_corners=False)
        return image.permute(0, 2, 3, 1).flatten(1, 2)

    def forward(self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool = False) -> torch.Tensor:
        """[B, channels, height, width] -> [B, T, E].

        Raises:
            ValueError: on images that do not fit; of another size than the model's, without `interpolate_pos_encoding`.
        """
        patches = self.patch_embeddings(pixel_values)  # [B, patches, E]
        size, patch_size = pixel_values.shape[2:], self.patch_embeddings.patch_size
        if not interpolate_pos_encoding and tuple(size) != self.image_size:
            raise ValueError(
                f"images of {size[0]}x{size[1]} pixels, but the model's image_size is {self.image_size[0]}x"
                f"{self.image_size[1]}: resize them, or pass interpolate_pos_encoding=True."
            )
        tokens = patches + self.positions((size[0] // patch_size[0], size[1] // patch_size[1]))
        if self.cls_token is not None:
            cls = self.cls_token + self.position_embeddings[:, :1] if self.is_learned else self.cls_token
            tokens = torch.cat([cls.expand(len(tokens), -1, -1), tokens], dim=1)  # [B, 1 + patches, E]
        return self.dropout(tokens)


def make_qk_norm(config: DCViTConfig) -> nn.Module:
    """The norm of queries or keys, or nothing in its place."""
    has_norm = config.qk_norm is not None
    return nn.LayerNorm(config.head_dim, eps=config.layer_norm_eps, bias=False) if has_norm else nn.Identity()


class DCViTAttention(nn.Module):
    """Dynamically composable multi-head attention of all tokens to all tokens (paper section 3)."""

    is_causal = False
    keeps_shapes = True  # as in `DCFormerAttention`
    _z3_leaf = True  # as there

    def __init__(self, config: DCViTConfig, layer_idx: int = 0):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_probs_dropout_prob
        size, bias = config.hidden_size, config.qkv_bias
        self.q_proj = nn.Linear(size, size, bias=bias)
        self.k_proj = nn.Linear(size, size, bias=bias)
        self.v_proj = nn.Linear(size, size, bias=bias)
        self.o_proj = nn.Linear(size, size)
        self.q_norm, self.k_norm = make_qk_norm(config), make_qk_norm(config)
        self.compose = DCFormerCompose(config)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Unpack[TransformersKwargs]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, T, E] -> output [B, T, E] and, from the eager implementation, composed weights [B, H, T, T].

        Args:
            hidden_states: [B, T, E], normalized.
            attention_mask: what each query sees, as the implementation's mask function made it; None for all tokens.
        """
        projected_query, key, value = self._project(hidden_states)  # [B, H, T, D]
        query, key, value = self._place(projected_query, key, value)
        implementation = self.config._attn_implementation
        if implementation == DEFAULT_ATTENTION:  # decided where the tensors are
            implementation = default_implementation(self, hidden_states, query, key, attention_mask)
        pre, post = stages(self.compose, self.compose(hidden_states, implementation))
        refuse_without_composition(implementation, pre, post)
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        output, weights = attend_without_autocast(
            attention_interface,
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            pre=pre,
            post=post,
            **kwargs,
        )
        return self._output(output, hidden_states, projected_query), weights

    def _project(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        """[B, T, E] -> queries, keys and values [B, H, T, D]."""
        parts = [layer(hidden_states) for layer in (self.q_proj, self.k_proj, self.v_proj)]
        return [x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in parts]

    def _place(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [B, H, T, D] of `_project` for the attention function: normalized."""
        query, key = self.q_norm(query.transpose(1, 2)), self.k_norm(key.transpose(1, 2))  # [B, T, H, D]
        return query.transpose(1, 2), key.transpose(1, 2), value

    def _output(self, output: torch.Tensor, hidden_states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """[B, T, H, D] of the heads -> [B, T, E]; variants may read the hidden states and the queries of `_project`."""
        return self.o_proj(output.flatten(2))


class DCViTMLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, config: DCViTConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, T, E] -> [B, T, E]."""
        return self.fc2(self.activation_fn(self.fc1(hidden_states)))


class DCViTLayer(GradientCheckpointingLayer):
    """One layer: attention and MLP in sequence, each behind a norm."""

    attention_class: type[nn.Module] = DCViTAttention  # a variant's subclass of the layer names its own

    def __init__(self, config: DCViTConfig, layer_idx: int = 0):
        super().__init__()
        self.attention = self.attention_class(config, layer_idx)
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = DCViTMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Unpack[TransformersKwargs]
    ) -> torch.Tensor:
        """[B, T, E] -> [B, T, E]."""
        attended, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
        hidden_states = hidden_states + self.dropout(attended)
        return hidden_states + self.dropout(self.mlp(self.layernorm_after(hidden_states)))


class DCViTPooler(nn.Module):
    """The vector that represents an image: of the class token, or the mean of the patches; then dense and tanh."""

    def __init__(self, config: DCViTConfig):
        super().__init__()
        self.takes_cls = config.pooling == "cls"
        width = config.representation_size
        self.dense = nn.Linear(config.hidden_size, width) if width is not None else None

    def forward(self, hidden_states: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
        """[B, T, E] -> [B, E], or [B, `representation_size`].

        Args:
            hidden_states: [B, T, E].
            visible: [B, T] with 1 for the tokens whose mean is taken; None for all. Without any, the mean is zero.
        """
        if self.takes_cls:
            pooled = hidden_states[:, 0]
        elif visible is None:
            pooled = hidden_states.mean(dim=1)
        else:
            visible = visible.to(hidden_states)[..., None]  # [B, T, 1]
            pooled = (hidden_states * visible).sum(dim=1) / visible.sum(dim=1).clamp(min=1)
        return pooled if self.dense is None else torch.tanh(self.dense(pooled))


@auto_docstring
class DCViTPreTrainedModel(PreTrainedModel):
    config: DCViTConfig
    base_model_prefix = "dcvit"
    main_input_name = "pixel_values"
    input_modalities = "image"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DCViTLayer"]
    _supports_flash_attn = False
    _supports_sdpa = False
    _supports_flex_attn = False
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": DCViTLayer, "attentions": DCViTAttention}
    _input_embed_layer = "patch_embeddings"
    takes_library_attention = False  # the default is torch's own already where nothing is composed or masked

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads a model as Transformers does.

        Raises:
            OSError: when a weight file is damaged, naming it.
            ValueError: on a checkpoint with a head system, for a class without one.
        """
        path = pretrained_model_name_or_path
        has_config, has_system = kwargs.get("config") is not None, hasattr(cls.config_class, "head_system")
        if path is not None and not has_system and (not has_config or os.path.isdir(path)):  # the Hub is asked no more
            refuse_head_system(cls, path, stored_config(cls.config_class, path, kwargs))
        with naming_damage(path, kwargs):
            return super().from_pretrained(path, *args, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Saves a model as Transformers does.

        Raises:
            ValueError: for a model that would be loaded with layers that it does not have.
        """
        if isinstance(encoder := self.base_model, DCViTModel):
            refuse_missing_layers(len(encoder.running_layers()), encoder.config.num_hidden_layers)
        super().save_pretrained(save_directory, *args, **kwargs)

    # The language models' own: what can compose heads, and why there are no maps.
    get_correct_attn_implementation: Any = DCFormerPreTrainedModel.get_correct_attn_implementation
    _why_no_maps: Any = DCFormerPreTrainedModel._why_no_maps

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The fork's: Xavier-uniform projections, LeCun-normal patches and representation, a head of zeros."""
        # The library asks only about modules with parameters of their own, so a layer is known by who holds it.
        if isinstance(module, nn.Linear):
            if module is getattr(self, "classifier", None):
                init.zeros_(module.weight)
            elif module is getattr(getattr(self, "pooler", None), "dense", None):
                _lecun_normal(module.weight)
            else:
                init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            _lecun_normal(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, DCViTEmbeddings):
            module.reset_positions()
            if module.cls_token is not None:
                init.zeros_(module.cls_token)
        elif isinstance(module, DCFormerCompose):
            std, size = compose_init_std(self.config), self.config.hidden_size + module.heads_per_group
            std["gate_proj.weight"] = self.config.compose_gate_init * math.sqrt(2 / size)
            init_compose(module, std)
        else:
            super()._init_weights(module)


@auto_docstring(
    custom_intro="""
    DCViT without a head on top: hidden states of a vision Transformer whose attention heads are composed before and
    after the softmax (arXiv 2405.08553).
    """
)
class DCViTModel(DCViTPreTrainedModel):
    layer_class: type[nn.Module] = DCViTLayer

    def __init__(self, config: DCViTConfig):
        config.validate_architecture()  # fields may have been set since it was made
        super().__init__(config)
        self.embeddings = DCViTEmbeddings(config)
        self.layers = nn.ModuleList([self.layer_class(config, i) for i in range(config.num_hidden_layers)])
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.pooler = DCViTPooler(config)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    @auto_docstring
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        r"""
        attention_mask (`torch.Tensor` of shape `(batch_size, tokens)`, *optional*):
            1 for tokens that are seen, 0 for others; tokens are the patches row by row, behind the class token if there
            is one. Hidden patches do not count in the mean, either. Or a mask of what each query sees,
            `(batch_size, 1, tokens, tokens)`; a query that sees nothing gets zeros from attention.
        """
        if pixel_values is None:
            raise ValueError("Give pixel_values, [batch, channels, height, width].")
        check_trace(kwargs.get("compose_trace"), self.layers, self.training)
        if kwargs.get("output_attentions", self.config.output_attentions) and (missing := self._why_no_maps()):
            logger.warning_once(f"{missing} The tuple of attentions is empty.")  # as with Transformers' sdpa
        pixel_values = pixel_values.to(self.embeddings.patch_embeddings.projection.weight.dtype)
        hidden_states = self.embeddings(pixel_values, bool(interpolate_pos_encoding))
        visible = mask = None
        if attention_mask is not None:
            visible = attention_mask if attention_mask.ndim == 2 else None
            if attention_mask.ndim != 4 and attention_mask.shape != hidden_states.shape[:2]:
                raise ValueError(
                    f"attention_mask of shape {tuple(attention_mask.shape)} does not fit: expected "
                    f"{tuple(hidden_states.shape[:2])}, a row for each image and a column for each token; or one of "
                    "(batch, 1, tokens, tokens)."
                )
            mask = create_bidirectional_mask(self.config, hidden_states, attention_mask)
        for layer in self.running_layers():
            hidden_states = layer(hidden_states, mask, **kwargs)
        hidden_states = self.layernorm(hidden_states)
        return BaseModelOutputWithPooling(
            last_hidden_state=hidden_states,
            pooler_output=self.pooler(hidden_states, visible),
        )

    def running_layers(self) -> nn.ModuleList:
        """The layers that run: as many of the first as the configuration says.

        Raises:
            ValueError: naming the field.
        """
        number = self.config.num_hidden_layers
        if number < 0:
            raise ValueError(f"num_hidden_layers={number} must not be negative.")
        return self.layers[:number]


@auto_docstring(
    custom_intro="""
    DCViT with a linear classifier of images on top of what it pools.
    """
)
class DCViTForImageClassification(DCViTPreTrainedModel):
    model_class: type[DCViTModel] = DCViTModel

    def __init__(self, config: DCViTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.dcvit = self.model_class(config)
        width = config.representation_size or config.hidden_size
        self.classifier = nn.Linear(width, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        r"""
        attention_mask (`torch.Tensor` of shape `(batch_size, tokens)`, *optional*):
            As for `DCViTModel`.
        """
        outputs: BaseModelOutputWithPooling = self.dcvit(
            pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            attention_mask=attention_mask,
            **kwargs,
        )
        logits = self.classifier(outputs.pooler_output)
        loss = None
        if labels is not None:
            self._check_labels(labels)
            loss = self.loss_function(labels, logits, self.config, **kwargs)
            if self.config.problem_type != "single_label_classification":  # a mean, whatever number the library is told
                loss = loss * share_of_labels(labels, **kwargs)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def _check_labels(self, labels: torch.Tensor) -> None:
        """Refuses labels of classes that do not exist, on the CPU: on a GPU, where reading waits, PyTorch asserts."""
        is_class = labels.dtype in (torch.int64, torch.int32) and self.num_labels > 1
        if not is_class or labels.device.type != "cpu" or not has_values(labels.device):
            return
        if self.config.problem_type not in (None, "single_label_classification"):
            return
        wrong = labels[((labels < 0) & (labels != -100)) | (labels >= self.num_labels)]
        if len(wrong):
            raise ValueError(
                f"labels hold {sorted(set(wrong.tolist()))[:10]}, but num_labels={self.num_labels}: expected 0 to "
                f"{self.num_labels - 1}, or -100 for images that do not count."
            )


__all__ = ["DCViTForImageClassification", "DCViTModel", "DCViTPreTrainedModel", "sincos_positions"]
