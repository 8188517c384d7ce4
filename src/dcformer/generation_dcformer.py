"""What `generate` asks of a model whose cache holds composition weights, and how the library's answers differ here."""

from collections.abc import Callable
from typing import Any

from transformers.cache_utils import Cache, StaticCache
from transformers.generation import EarlyExitCandidateGenerator, GenerationMixin

from .cache_dcformer import CACHE_NAME, use_static_layers


class _EarlyExit(EarlyExitCandidateGenerator):
    """Drafts with the model's first layers. Unlike the library's, a failure leaves the model its layers."""

    def get_candidates(self, *args: Any, **kwargs: Any) -> Any:
        config = self.assistant_model.config
        layers = config.num_hidden_layers
        try:
            return super().get_candidates(*args, **kwargs)
        finally:
            config.num_hidden_layers = layers


class DCFormerGenerationMixin(GenerationMixin):
    """`generate` for a `DCFormerPreTrainedModel` with a decoder. What it cannot do it refuses before it computes."""

    config: Any
    model: Any
    _why_no_maps: Callable[[], str | None]

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        """As the library's, and refuses `output_attentions=True` where there are no maps to return.

        Raises:
            ValueError: naming the implementation, and the one that holds maps; or fields of the configuration that no
                forward pass, and so no cache, can be made from.
        """
        self.model.running_layers()
        given = (generation_mode, generation_config, *args)
        super()._validate_generation_mode(*given, **kwargs)  # type: ignore[misc]  # the mixin's self is a protocol
        if generation_config.output_attentions and (missing := self._why_no_maps()):
            raise ValueError(missing)
        early, layers = generation_config.assistant_early_exit, self.config.num_hidden_layers
        if early is not None and not 1 <= early <= layers:
            raise ValueError(f"assistant_early_exit={early}: expected how many layers are to draft, 1 to {layers}.")

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """As the library's, but an assistant is not asked for a `ComposeTrace`, which is of this model; and drafting
        with fewer layers leaves the model its layers, however it ends.

        Raises:
            ValueError: with a cache that holds tokens: assisted decoding would pass the whole text to it once more; and
                with a static one, the assistant's too, which drafts that are refused would overrun, and whose windows
                cannot take them back.
        """
        given = kwargs["model_kwargs"]
        cache = given.get(CACHE_NAME)
        if isinstance(cache, StaticCache):
            raise ValueError(
                "assisted decoding with a static cache is not supported, as drafts overrun it: leave "
                "cache_implementation away, or generate without assistant_model, assistant_early_exit and "
                "prompt_lookup_num_tokens."
            )
        if cache is not None and (seen := cache.get_seq_length()):
            raise ValueError(
                f"assisted decoding begins with the whole text, and {CACHE_NAME} already holds {seen} tokens of it: "
                f"leave {CACHE_NAME} away, or generate without assistant_model, assistant_early_exit and "
                "prompt_lookup_num_tokens."
            )
        own = getattr(getattr(kwargs.get("assistant_model"), "generation_config", None), "cache_implementation", None)
        if own is not None and "static" in own:
            raise ValueError(
                f"the assistant's generation_config has cache_implementation={own!r}: drafts that are refused are "
                "taken back, which a static cache cannot. Set it to None."
            )
        kwargs["model_kwargs"] = {name: value for name, value in given.items() if name != "compose_trace"}
        drafts: Any = super()._get_candidate_generator(*args, **kwargs)  # type: ignore[misc]  # as above
        if type(drafts) is EarlyExitCandidateGenerator:
            drafts.__class__ = _EarlyExit
        return drafts

    def _prepare_static_cache(self, *args: Any, **kwargs: Any) -> Cache:
        """The static cache of `generate`, with local layers that compile to a single graph."""
        cache: Any = super()._prepare_static_cache(*args, **kwargs)  # type: ignore[misc]  # as above
        use_static_layers(cache, self.config.sliding_window)
        return cache

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses continuous batching (`generate_batch`, `transformers serve --continuous-batching`).

        Raises:
            NotImplementedError: always, with the reason.
        """
        config = self.config
        rows = f"its paged cache makes all rows head_dim={config.head_dim} wide, but"
        if config.composes:
            why = (
                f"{rows} keys and values of this model carry composition weights behind them, and it accepts only "
                "Transformers' own attention implementations, which do not compose heads"
            )
        elif config.head_embeddings is not None:
            why = f"{rows} keys of this model (head_embeddings) are {config.cached_head_dim('pre')} wide"
        elif config.key_head_map is not None or config.value_head_map is not None:
            why = "its paged cache has one number of heads for all keys and values, but this model has head maps"
        else:
            why = "its cache does not go through this model's attention"
        raise NotImplementedError(
            f"{self.__class__.__name__} does not support continuous batching: {why}. Use generate() with a padded "
            "batch, or the server without --continuous-batching."
        )

    def _get_static_cache_init_shape(self) -> tuple[Any, Any] | None:
        """Head count and width for a static cache allocated before the first forward (`prefill_chunk_size`)."""
        shape: Any = super()._get_static_cache_init_shape()  # type: ignore[misc]  # as above
        config = self.config
        parts = {
            (config.cached_heads(stage, layer), config.cache_width(stage, layer))
            for stage in ("pre", "post")
            for layer in range(config.num_hidden_layers)
        }
        if shape is None or len(parts) != 1:  # None: allocate on the first forward, from what it brings
            return None
        heads, width = parts.pop()
        heads_of_process, _ = shape  # fewer than the configuration's under tensor parallelism
        return heads * heads_of_process // config.num_key_value_heads, width
