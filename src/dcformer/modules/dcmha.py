"""`DCMHA`: dynamically composable attention with the interface of `torch.nn.MultiheadAttention`.

The formulas are the package's: weight generators and composition of `compose_dcformer`, attention functions of
`attention_dcformer`, `chunked_dcformer` and `kernels`. What is added is cross-attention, whose queries and keys are
made from different states: query-wise composition weights are computed from the former, key-wise ones from the latter.

Letters: B batch, T queries, S keys, E width of the queries, H heads, Hkv key/value heads, D head dim.
"""

from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention_dcformer import attend_without_autocast, eager_attention
from ..compose_dcformer import ComposeSettings, DCFormerCompose, Stages, compose_init_std, stages
from ..errors import DCFormerError
from ..head_systems.base import HeadSystem
from ..head_systems.collaborative_mixing import Mixing
from ..head_systems.options import HeadSizes, HeadSystemOptions
from ..head_systems.registry import system_class
from ..implementations_dcformer import CHUNKED, FUSED_ATTENTION


def make_generators(settings: ComposeSettings, zero_init: bool) -> DCFormerCompose:
    """Weight generators with their initial values.

    Args:
        settings: what composes.
        zero_init: the generators' outputs are zero, so that attention is at first what it is without composition. Only
            the half of `qkw` that gives `up`, the gates and the static projections are zero: were `down` zero too,
            neither would ever get a gradient.
    """
    generators = DCFormerCompose(settings)
    std = compose_init_std(settings)
    with torch.no_grad():
        for name, parameter in generators.named_parameters():
            parameter.normal_(0, std[name])
            if zero_init and name == "qkw":
                parameter[:, parameter.shape[1] // 2 :] = 0  # [G·C·K, 2·R·M]: down, then up
            elif zero_init and name != "dw1_proj.weight":
                parameter.zero_()
    return generators


def one_side(settings: ComposeSettings, side: str, hidden_size: int) -> ComposeSettings | None:
    """Settings of the generators of one side, for states of their own; None where that side composes nothing.

    Args:
        settings: those of the whole attention.
        side: "query", which also has the static projections, or "key".
        hidden_size: width of the states of that side.
    """
    query, key = settings.compose_query and side == "query", settings.compose_key and side == "key"
    static = settings.compose_static and side == "query"
    if not (query or key or static):
        return None
    return replace(settings, hidden_size=hidden_size, compose_query=query, compose_key=key, compose_static=static)


def _check_sizes(embed_dim: Any, num_heads: Any, num_kv_heads: Any, kdim: Any, vdim: Any) -> None:
    """Refuses numbers that make no heads. Arguments as for `DCMHA`, none of them None."""
    sizes = {
        "embed_dim": embed_dim, "num_heads": num_heads, "kdim": kdim, "vdim": vdim, "num_kv_heads": num_kv_heads
    }  # fmt: skip
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
            raise DCFormerError(f"{name}={size!r} must be a whole number of at least 1.")
    if embed_dim % num_heads:
        raise DCFormerError(f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads}: change one of them.")
    if num_heads % num_kv_heads:
        raise DCFormerError(f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}: choose a divisor.")


class DCMHA(nn.Module):
    """Dynamically composable multi-head attention as a drop-in for `torch.nn.MultiheadAttention`.

    Source: arXiv 2405.08553, section 3.1; for cross-attention the authors' answer that query-wise weights come from the
    decoder's states and key-wise ones from the encoder's. The state dict is that of `nn.MultiheadAttention`, and
    `compose.query.*` and `compose.key.*`, and with `qk_norm` the scales `q_norm.weight` and `k_norm.weight`.

    Args:
        embed_dim: width E of the queries and of the output.
        num_heads: H.
        dropout: probability of dropping a composed weight in training.
        bias: biases of the projections.
        kdim, vdim: widths of keys and values; E when not given.
        batch_first: inputs are [B, N, width] rather than [N, B, width].
        num_kv_heads: Hkv, for grouped-query attention; H when not given.
        compose_rank, compose_groups, compose_pre, compose_post, compose_query, compose_key, compose_projection,
            compose_gate, compose_static, compose_act: as in `DCFormerConfig`.
        qk_norm: RMS norm with scale over the head dim of queries and keys.
        attn_implementation: "eager", "dcformer_chunked" or "dcformer_triton"; by default eager where weights are asked
            for or a mask is trained, and chunked, which holds no attention maps, elsewhere.
        zero_init: begin as attention without composition; see `make_generators`.
        head_system, head_system_options: how heads interact beside composition, a name of `HEAD_SYSTEMS` and its
            options. The parameters of its projections are below `system`, not those of `nn.MultiheadAttention`; keys
            and values are made of the same states, of width E; see `losses`. What goes by the number of a layer, such
            as the default of "overlapped", has to be given as a number; a list of layers has one entry.
        device, dtype: of the parameters.

    Raises:
        DCFormerError: on sizes that do not fit, and on an unknown or unavailable implementation.
        ValueError: on settings of composition that contradict each other (all off are plain attention), and on an
            unknown head system or option of it.
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None

    # `key_padding_mask` of the last call, where it is of the queries, too, and the system has losses.
    _padding: torch.Tensor | None = None

    # `nn.TransformerEncoderLayer` reads this: where it is True, inference computes attention past this module.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        num_kv_heads: int | None = None,
        compose_rank: int = 2,
        compose_groups: int = 1,
        compose_pre: bool = True,
        compose_post: bool = True,
        compose_query: bool = True,
        compose_key: bool = True,
        compose_projection: bool = True,
        compose_gate: bool = True,
        compose_static: bool = False,
        compose_act: str = "gelu",
        qk_norm: bool = False,
        attn_implementation: str | None = None,
        zero_init: bool = False,
        head_system: str = "plain",
        head_system_options: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        kdim, vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_sizes(embed_dim, num_heads, num_kv_heads, kdim, vdim)
        check_flags(qk_norm=qk_norm, zero_init=zero_init)
        rate: Any = dropout
        if not (isinstance(rate, Real) and 0 <= float(rate) < 1):
            raise DCFormerError(f"dropout={dropout!r} must be a number in [0, 1).")
        self.embed_dim, self.kdim, self.vdim = embed_dim, kdim, vdim
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, embed_dim // num_heads
        self.dropout, self.batch_first = dropout, batch_first
        self.attn_implementation = attn_implementation
        if attn_implementation is not None:
            _check_implementation(attn_implementation)

        kv_width = num_kv_heads * self.head_dim
        self._widths = [embed_dim, kv_width, kv_width]  # of queries, keys and values
        is_packed, has_system = kdim == vdim == embed_dim, head_system != "plain"
        if has_system and not is_packed:
            raise DCFormerError(
                f"head_system={head_system!r} with kdim={kdim} and vdim={vdim}: its keys and values are made of states "
                f"as wide as the queries' ({embed_dim}); leave kdim and vdim out."
            )
        shapes = {
            "in_proj_weight": (sum(self._widths), embed_dim) if is_packed else None,
            "q_proj_weight": None if is_packed else (embed_dim, embed_dim),
            "k_proj_weight": None if is_packed else (kv_width, kdim),
            "v_proj_weight": None if is_packed else (kv_width, vdim),
            "in_proj_bias": (sum(self._widths),) if bias else None,
        }
        for name, shape in shapes.items():
            parameter = None if shape is None or has_system else nn.Parameter(torch.empty(shape))
            self.register_parameter(name, parameter)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if qk_norm else None
        settings = ComposeSettings(
            hidden_size=embed_dim,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            compose_rank=compose_rank,
            compose_groups=compose_groups,
            compose_pre=compose_pre,
            compose_post=compose_post,
            compose_query=compose_query,
            compose_key=compose_key,
            compose_projection=compose_projection,
            compose_gate=compose_gate,
            compose_static=compose_static,
            compose_act=compose_act,
        )
        options = system_class(head_system).options_class.of(head_system_options)
        self.system = self._make_system(head_system, options, settings, bias, qk_norm) if has_system else None
        self.scaling = self.head_dim**-0.5 if self.system is None else self.system.scaling
        width = embed_dim if self.system is None else self.system.output_width
        self.out_proj = nn.Linear(width, embed_dim, bias=bias)
        self.compose = nn.ModuleDict()
        for side, width in (("query", embed_dim), ("key", kdim)):
            if (of_side := one_side(settings, side, width)) is not None:
                self.compose[side] = make_generators(of_side, zero_init)
        self._reset_projections()
        self.to(device=device, dtype=dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is of the last forward pass, as the system's own."""
        return super().__getstate__() | {"_padding": None}

    def _make_system(
        self, name: str, options: HeadSystemOptions, settings: ComposeSettings, bias: bool, qk_norm: bool
    ) -> HeadSystem:
        sizes = HeadSizes(
            hidden_size=self.embed_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            bias=bias,
            qk_norm=qk_norm,
            composed=settings.composes,
            knows_layer=False,
        )
        options.check_config(settings)
        system = system_class(name)(sizes, options)
        for module in system.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, HeadSystem | Mixing):
                module.init_weights()
        return system

    def _reset_projections(self) -> None:
        """The initial values of `nn.MultiheadAttention`."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> "DCMHA":
        """A `DCMHA` with the sizes, parameters (copied, frozen where they are), device, dtype and mode of a
        `torch.nn.MultiheadAttention`.

        Args:
            module: the attention to copy.
            options: keyword arguments of `DCMHA`, but for sizes and `bias`, which are the module's; `zero_init=True`
                computes at first what `module` does, where the options of a head system leave that possible: by default
                they are those of `to_head_system`.

        Raises:
            DCFormerError: when `module` is something else, or has `add_bias_kv` or `add_zero_attn`; on sizes and `bias`
                other than its own.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise DCFormerError(f"from_torch expects a torch.nn.MultiheadAttention, got a {type(module).__name__}.")
        for name, is_on in (("add_bias_kv", module.bias_k is not None), ("add_zero_attn", module.add_zero_attn)):
            if is_on:
                raise DCFormerError(f"the module has {name}=True, which DCMHA does not offer: train one without it.")
        decided: dict[str, Any] = {
            "embed_dim": module.embed_dim,
            "num_heads": module.num_heads,
            "num_kv_heads": module.num_heads,
            "kdim": module.kdim,
            "vdim": module.vdim,
            "bias": module.in_proj_bias is not None,
        }
        for name, value in decided.items():
            if options.get(name) not in (None, value):
                raise DCFormerError(
                    f"{name}={options[name]!r}: the module's is {value}, and its parameters are copied as they are. "
                    "Leave it out, or make a new DCMHA."
                )
        own = {
            "dropout": module.dropout,
            "batch_first": module.batch_first,
            "device": module.out_proj.weight.device,
            "dtype": module.out_proj.weight.dtype,
        }
        if (name := options.get("head_system", "plain")) != "plain":
            has_lost_biases = decided["bias"] and not options.get("qk_norm", False)
            defaults = system_class(name).options_class.for_conversion(has_lost_biases)
            given = options.get("head_system_options")
            if given is None or isinstance(given, Mapping):  # anything else is refused below
                options["head_system_options"] = {**defaults, **(given or {})}
        made = cls(**(own | options | decided))
        if made.system is not None:
            made._take_over(module)
        else:
            state = made.state_dict()
            made.load_state_dict(module.state_dict() | {name: state[name] for name in state if _is_new(name)})
        is_trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(is_trained.get(name, parameter.requires_grad))
        return made.train(module.training)

    @torch.no_grad()
    def _take_over(self, module: nn.MultiheadAttention) -> None:
        """Copies the projections of plain attention to the head system."""
        linears: list[Any] = [nn.Linear(self.embed_dim, self.embed_dim, device="meta") for _ in range(3)]
        for linear, weight in zip(linears, module.in_proj_weight.chunk(3), strict=True):
            linear.weight = nn.Parameter(weight)
        biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        for linear, bias in zip(linears, biases, strict=True):
            linear.bias = None if bias is None else nn.Parameter(bias)
        system: Any = self.system
        self.out_proj.weight.copy_(system.from_mha(*linears, module.out_proj))
        if self.out_proj.bias is not None:
            self.out_proj.bias.copy_(module.out_proj.bias)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of `query` to `key` and `value`, as `nn.MultiheadAttention` computes it, with composed heads.

        Args:
            query: [T, B, E], [B, T, E] with `batch_first`, or [T, E]; query-wise composition weights are made from it.
            key: [S, B, kdim], likewise; key-wise composition weights are made from it.
            value: [S, B, vdim], likewise.
            key_padding_mask: [B, S], or [S]: boolean, True at keys that no query may see, or added to the scores.
            need_weights: return the weights as well, which needs the eager implementation and holds whole maps.
            attn_mask: [T, S], or [B·H, T, S]: boolean, True where a query may not see a key, or added to the scores,
                where only -inf hides. As all masks it acts after the composition of the scores, and before that of the
                weights: what a mask of its own keeps from one head, this head still has of the others' weights, unless
                composition after the softmax is off.
            average_attn_weights: return the mean of the heads' weights.
            is_causal: says that `attn_mask`, which must be given, is causal. Nothing is gained by it here.

        Returns:
            output, of the shape of `query`; and the composed weights, [B, T, S] or [B, H, T, S], without B for inputs
            that are not batched, or None. Rows of composed weights need not sum to 1, and may be negative. A query that
            may see no key gets zeros, where `nn.MultiheadAttention` gives NaN.

        Raises:
            DCFormerError: on shapes or dtypes that do not fit, and where weights are asked of an implementation without
                maps.
        """
        if self.system is not None and key is not value:
            raise DCFormerError("a head system makes keys and values of the same states: pass one tensor for both.")
        is_batched, is_self = self._check_inputs(query, key, value), query is key
        mask = self._mask(query, key, is_batched, key_padding_mask, attn_mask, is_causal)
        if not is_batched:
            query, key, value = (states[None] for states in (query, key, value))
        elif not self.batch_first:
            query, key, value = (states.transpose(0, 1) for states in (query, key, value))
        implementation = self._implementation(need_weights, mask)
        pre, post = self._compose_weights(query, key, implementation)
        q, k, v, *raw_query = self._project(query, key, value)  # [B, H, T, D], [B, Hkv, S, D]
        output, weights = attend_without_autocast(
            ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention),
            self,
            q,
            k,
            v,
            mask,
            scaling=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            pre=pre,
            post=post,
            is_causal=False,
        )
        if self.system is not None:
            output = self.system(output, query, *raw_query)
            if type(self.system).losses is not HeadSystem.losses:
                self._padding = key_padding_mask if is_self else None
        output = self.out_proj(output.flatten(2))  # [B, T, E]
        if not is_batched:
            output = output[0]
        elif not self.batch_first:
            output = output.transpose(0, 1)
        if not need_weights or weights is None:
            return output, None
        weights = weights.mean(dim=1) if average_attn_weights else weights
        return output, weights if is_batched else weights[0]

    def losses(self) -> dict[str, torch.Tensor]:
        """Losses of the head system in the last call, by name and without their coefficient; to be asked for once.

        In self-attention (one tensor for all three inputs), tokens that `key_padding_mask` hides, by True or -inf, are
        left out. Empty without a system, and where it has none.
        """
        if self.system is None:
            return {}
        padding, visible, self._padding = self._padding, None, None
        if padding is not None:
            visible = ~padding if padding.dtype == torch.bool else padding != float("-inf")
            visible = visible.reshape(-1, visible.shape[-1])  # [B, T]
        return self.system.losses(visible)

    def _compose_weights(self, query: torch.Tensor, key: torch.Tensor, implementation: str) -> Stages:
        """The weights of both stages, from [B, T, E] and [B, S, kdim]."""
        states = {"query": query, "key": key}
        made = [generators(states[side], implementation) for side, generators in self.compose.items()]
        generators: Any = next(iter(self.compose.values()), None)
        return stages(generators, *made) if made else (None, None)

    def _project(self, *states: torch.Tensor) -> list[torch.Tensor]:
        """The states of queries, keys and values, [B, N, width], as heads [B, H(kv), N, D].

        With a head system, as it has them, and its queries before their norm.
        """
        if self.system is not None:
            raw_query, key, value = self.system.project(*states[:2])
            query = self.system.position(raw_query, self.q_norm or nn.Identity())
            key = self.system.position(key, self.k_norm or nn.Identity())
            return [*self.system.expand(query, key, value), raw_query]
        if self.in_proj_weight is not None:
            matrices: Any = self.in_proj_weight.split(self._widths)
        else:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.split(self._widths)
        heads = [
            F.linear(x, matrix, bias).unflatten(-1, (-1, self.head_dim))
            for x, matrix, bias in zip(states, matrices, biases, strict=True)
        ]
        norms = (self.q_norm, self.k_norm, None)
        heads = [x if norm is None else norm(x) for x, norm in zip(heads, norms, strict=True)]
        return [x.transpose(1, 2) for x in heads]

    def _implementation(self, need_weights: bool, mask: torch.Tensor | None) -> str:
        if self.attn_implementation is None:
            return "eager" if need_weights or (mask is not None and mask.requires_grad) else CHUNKED
        if need_weights and self.attn_implementation != "eager":
            raise DCFormerError(
                f"need_weights=True asks for attention weights, which attn_implementation={self.attn_implementation!r} "
                "never holds: pass need_weights=False, or use attn_implementation='eager'."
            )
        return self.attn_implementation

    def _check_inputs(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether the inputs are batched."""
        for name, states in (("query", query), ("key", key), ("value", value)):
            _check_tensor(name, states)
        shapes = [tuple(states.shape) if not states.is_nested else "nested" for states in (query, key, value)]
        text = f"query {shapes[0]}, key {shapes[1]} and value {shapes[2]}"
        if "nested" in shapes:
            raise DCFormerError(
                f"{text}: DCMHA takes no nested tensors. In nn.TransformerEncoder pass enable_nested_tensor=False; "
                "of one that is made, as in nn.Transformer, set encoder.use_nested_tensor = False."
            )
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            raise DCFormerError(f"{text}: expected three inputs of 2 dimensions, or 3 with a batch.")
        widths = (self.embed_dim, self.kdim, self.vdim)
        if tuple(states.shape[-1] for states in (query, key, value)) != widths:
            raise DCFormerError(f"{text}: expected widths {widths}, embed_dim, kdim and vdim.")
        is_batched, batch = query.dim() == 3, 0 if self.batch_first else 1
        if key.shape[:-1] != value.shape[:-1] or (is_batched and query.shape[batch] != key.shape[batch]):
            order = "[B, T, E] and [B, S, width]" if self.batch_first else "[T, B, E] and [S, B, width]"
            raise DCFormerError(
                f"{text} do not fit together with batch_first={self.batch_first}: expected {order}, or [T, E] and "
                "[S, width]."
            )
        return is_batched

    def _mask(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        is_batched: bool,
        key_padding_mask: torch.Tensor | None,
        attn_mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor | None:
        """Both as a mask of the package: [B or 1, 1 or H, T, S], True where a query sees a key, or additive."""
        if is_causal and attn_mask is None:
            raise DCFormerError(
                "is_causal=True only says what attn_mask is: pass the causal mask as well, for example "
                "nn.Transformer.generate_square_subsequent_mask(T)."
            )
        sequence = 1 if is_batched and self.batch_first else 0
        length, key_length = query.shape[sequence], key.shape[sequence]
        batch = query.shape[1 - sequence] if is_batched else 1
        heads = self.num_heads
        found: list[torch.Tensor] = []
        if attn_mask is not None:
            _check_mask("attn_mask", attn_mask, (length, key_length), (batch * heads, length, key_length))
            whole = attn_mask.dim() == 3
            found.append(attn_mask.unflatten(0, (batch, heads)) if whole else attn_mask[None, None])
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, (batch, key_length) if is_batched else (key_length,))
            padding = key_padding_mask if is_batched else key_padding_mask[None]
            found.append(padding[:, None, None].expand(-1, -1, length, -1))
        if not found:
            return None
        if all(mask.dtype == torch.bool for mask in found):
            hidden = found[0] if len(found) == 1 else found[0] | found[1]
            return ~hidden
        additive = [
            torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(mask, float("-inf"))
            if mask.dtype == torch.bool
            else mask
            for mask in found
        ]
        return _hidden_by_inf(additive[0] if len(additive) == 1 else additive[0] + additive[1])

    def extra_repr(self) -> str:
        """The sizes, for `print`."""
        return f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"


def check_flags(**flags: Any) -> None:
    """Refuses arguments that are not truth values.

    Raises:
        DCFormerError: naming the first one.
    """
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise DCFormerError(f"{name}={flag!r}: expected True or False.")


def _is_new(name: str) -> bool:
    """Whether a tensor of `DCMHA` is not one of `nn.MultiheadAttention`."""
    return name.startswith(("compose.", "q_norm.", "k_norm."))


def _check_implementation(name: str) -> None:
    known = ("eager", CHUNKED, *FUSED_ATTENTION)
    if name not in known:
        raise DCFormerError(
            f"attn_implementation={name!r} cannot compose attention heads: use one of {known}, or None."
        )
    if name != "eager" and name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        raise DCFormerError(
            f'attn_implementation={name!r} needs Triton, which is not installed: pip install "dcformer[kernels]"'
        )


def _hidden_by_inf(mask: torch.Tensor) -> torch.Tensor:
    """An additive mask in which -inf alone hides, for attention functions that hide at half of the least value, too.

    A row with a greater value gives weight zero to what they hide. The others are raised to a quarter of the least
    value, beside which scores in float32 vanish as they do beside the mask's own (but for float16's).
    """
    if not mask.shape[-1]:
        return mask
    least, top = torch.finfo(mask.dtype).min, mask.detach().amax(dim=-1, keepdim=True)
    return mask + torch.where((top <= least / 2) & ~top.isinf(), least / 4 - top, 0)


def _check_tensor(name: str, given: Any) -> None:
    if not isinstance(given, torch.Tensor):
        raise DCFormerError(f"{name} is of type {type(given).__name__}: expected a tensor.")


def _check_mask(name: str, mask: torch.Tensor, *shapes: tuple[int, ...]) -> None:
    _check_tensor(name, mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DCFormerError(
            f"{name} is of {mask.dtype}: expected bool, True where attention is not allowed, or floating point, to be "
            "added to the scores."
        )
    if tuple(mask.shape) not in shapes:
        raise DCFormerError(
            f"{name} has shape {tuple(mask.shape)}: expected {' or '.join(str(shape) for shape in shapes)}."
        )


__all__ = ["DCMHA"]
