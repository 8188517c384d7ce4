"""Small wrong changes of the kind that a real mistake makes, and the tests that are to notice them.

`mutation_check.py` makes them, one at a time, in a copy of the source. The old text of each is in its file exactly
once; `tests/tools/test_mutation_check.py` sees to it that this list keeps up with the source.
"""

from dataclasses import dataclass

COMPOSE, CACHE, CONFIG = "compose_dcformer.py", "cache_dcformer.py", "configuration_dcformer.py"
HUB, LAYOUTS = "hub_dcformer.py", "layouts_dcformer.py"
STORED, TOKENS = "stored_dcformer.py", "tokens_dcformer.py"
HUB_CONFIG, PARALLEL, OVERHEAD = "legacy_dcformer.py", "parallel_dcformer.py", "analysis/overhead.py"
MODEL, ATTENTION = "modeling_dcformer.py", "attention_dcformer.py"
ARGUMENTS = "arguments_dcformer.py"
GENERATION = "generation_dcformer.py"
MASKS, CHUNKED = "masks_dcformer.py", "chunked_dcformer.py"

T_COMPOSE, T_CACHE = "tests/test_compose_dcformer.py::", "tests/test_cache_dcformer.py::"
T_CONFIG, T_HUB = "tests/test_configuration_dcformer.py::", "tests/test_hub_dcformer.py::"
T_HUB_CONFIG, T_PARALLEL = "tests/test_legacy_dcformer.py::test_hub_", "tests/test_parallel_dcformer.py::"
T_HEADS = "tests/test_heads_dcformer.py::"
T_EMBEDDINGS = "tests/test_head_embeddings.py::"
T_OVERHEAD = "tests/analysis/test_analysis_overhead.py::"
T_MODEL, T_ATTENTION = "tests/test_modeling_dcformer.py::", "tests/test_attention_dcformer.py::"
T_MASKS, T_CHUNKED = "tests/test_masks_dcformer.py::", "tests/test_chunked_dcformer.py::"
T_SURGERY = "tests/test_surgery.py::"
T_GENERATION, T_CONVERT = "tests/test_generation.py::", "tests/conversion/test_convert.py::"
T_CHECKPOINT, T_INFERENCE = "tests/conversion/test_checkpoint.py::", "tests/conversion/test_inference.py::"
T_OUTPUT, T_ROUND_TRIP = "tests/conversion/test_output.py::", "tests/conversion/test_round_trip.py::"
T_VERIFY, T_CLI = "tests/conversion/test_verification.py::", "tests/conversion/test_cli.py::"
T_GENERATOR, T_DECODE = "tests/kernels/test_generator.py::", "tests/kernels/test_decode.py::"
T_BALANCE = "tests/kernels/test_balance.py::"
T_STEP = "tests/kernels/test_step.py::"
T_RECORDING = "tests/kernels/test_recording.py::"
T_REPEATED = "tests/kernels/test_repeated.py::"
T_ATTEND = "tests/kernels/test_attention.py::"
T_PRECISE = "tests/kernels/test_attention_precision.py::"
T_MARKS = "tests/kernels/test_attention_marks.py::"
T_KEPT = "tests/kernels/test_attention_kept_maps.py::"
T_REFUSED = "tests/kernels/test_attention_errors.py::"
T_BOUNDS = "tests/kernels/test_attention_bounds.py::"
T_LAUNCH = "tests/kernels/test_attention_launch.py::"
T_KERNEL = T_ATTEND + "test_output_and_gradients"
T_BEYOND = T_MARKS + "test_gradients_beyond_float16_are_noticed"
T_LARGE = T_PRECISE + "test_large_scores_beside_eager"
T_TAKEN = T_MARKS + "test_large_scores_that_composition_takes_away_are_noticed"
FORMULA, GENERATORS = T_COMPOSE + "test_compose_is_its_formula", T_COMPOSE + "test_generators_are_their_formulas"
PACKING = T_COMPOSE + "test_pack_and_unpack_are_inverse"
MAXTEXT, PAX = T_CONVERT + "test_maxtext_to_pytorch", T_CONVERT + "test_pax_to_pytorch"
FOLDERS = T_HUB + "test_folders_load"


@dataclass(frozen=True)
class Mutation:
    """One small wrong change.

    Attributes:
        area: part of the package, for the table.
        name: says what is wrong; unique.
        file: below `src/dcformer`.
        old: text that is there exactly once.
        new: what takes its place.
        tests: pytest's node ids, those that are to notice.
    """

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def needs_interpreter(self) -> bool:
        """Whether its tests are the kernels', which run in Triton's interpreter."""
        return any(test.startswith("tests/kernels") for test in self.tests)


def _in(area: str, file: str, *changes: tuple[str, ...]) -> list[Mutation]:
    """Mutations of one file, from (name, old, new, test, test, ...)."""
    return [
        Mutation(area, name, file, old, new, tests) for name, old, new, *tests_ in changes for tests in [(*tests_,)]
    ]


_COMPOSE = _in(
    "compose",
    COMPOSE,
    (
        "parameters of a variant begin as memory is",
        "    module.init_weights()\n",
        "",
        "tests/test_extending.py::test_parameters_of_a_variant_in_images_begin_as_it_says",
    ),
    ("static map from column to row", '"bgjts,gjm->bgmts"', '"bgjts,gmj->bgmts"', FORMULA),
    (
        "query branch reads the composed maps",
        'torch.einsum("bgjts,bgjtr->bgrts", a, grouped(query.down))',
        'torch.einsum("bgjts,bgjtr->bgrts", out, grouped(query.down))',
        FORMULA,
    ),
    (
        "key gate scales the composed maps",
        "out = out + a * grouped(key.gate)[..., None, :]",
        "out = out + out * grouped(key.gate)[..., None, :]",
        FORMULA,
    ),
    (
        "key low rank goes out with what came in",
        'torch.einsum("bgrts,bgmsr->bgmts", hidden, grouped(key.up))',
        'torch.einsum("bgrts,bgmsr->bgmts", hidden, grouped(key.down))',
        FORMULA,
    ),
    ("no skip connection", "    out = a\n", "    out = torch.zeros_like(a)\n", FORMULA),
    (
        "groups interleaved",
        "return tensor.to(maps.dtype).unflatten(1, (weights.groups, -1))",
        "return tensor.to(maps.dtype).unflatten(1, (-1, weights.groups)).transpose(1, 2)",
        FORMULA,
    ),
    (
        "float64 accumulated in float32",
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return torch.float32",
        T_COMPOSE + "test_accumulation_dtype",
    ),
    ("epsilon of the generators' norm", "COMPOSE_NORM_EPS = 1e-6", "COMPOSE_NORM_EPS = 1e-5", GENERATORS),
    (
        "norm over the ranks",
        "down.pow(2).mean(dim=3, keepdim=True)",
        "down.pow(2).mean(dim=-1, keepdim=True)",
        GENERATORS,
    ),
    (
        "norm in the model's dtype",
        "down = pair[0].to(compute)",
        "down = pair[0]",
        T_COMPOSE + "test_the_norm_of_low_precision_generators_is_in_float32",
    ),
    ("up is down", "up = pair[1].flatten(2, 3)", "up = pair[0].flatten(2, 3)", GENERATORS),
    (
        "rows of down and up interleaved",
        "pair = pair.view(len(pair) // count, count, batch, length, 2, r, m)  # [G, C, B, N, 2, R, M]\n"
        "            pair = pair.permute(4, 1, 2, 0, 6, 3, 5)",
        "pair = pair.view(-1, count, batch, length, r, 2, m)\n            pair = pair.permute(5, 1, 2, 0, 6, 3, 4)",
        GENERATORS,
    ),
    (
        "gate without tanh",
        "torch.tanh(gate.to(compute)).to(dtype)",
        "gate",
        GENERATORS,
    ),
    (
        "generators lead the groups of gates",
        "gate.unflatten(-1, (-1, count, m)).permute(3, 0, 2, 4, 1)",
        "gate.unflatten(-1, (count, -1, m)).permute(2, 0, 3, 4, 1)",
        GENERATORS,
    ),
    (
        "generators in alphabetical order",
        "zip(self.generators, packed, strict=True)",
        "zip(sorted(self.generators), packed, strict=True)",
        GENERATORS,
    ),
    (
        "generators without an activation",
        "hidden = self.act_fn(hidden)  # [B, N, G·C·K]\n            k = ",
        "k = ",
        GENERATORS,
    ),
    (
        "channels behind another head's keys",
        "packed.unflatten(1, (states.shape[1], -1))",
        "packed.unflatten(1, (-1, states.shape[1])).transpose(1, 2)",
        T_COMPOSE + "test_a_query_heads_channels_sit_behind_its_own_key_head",
    ),
    ("padding of ones", "packed.new_zeros(())", "packed.new_ones(())", PACKING),
    (
        "gate read one channel early",
        "gate = self._channels(2 * self.rank, ",
        "gate = self._channels(2 * self.rank - 1, ",
        T_COMPOSE + "test_parts_of_side_weights",
    ),
    (
        "heads of a key/value head far apart",
        "weights.unflatten(-1, (repeats, width)).permute(0, 1, 3, 4, 2)",
        "weights.unflatten(-1, (width, repeats)).permute(0, 1, 4, 3, 2)",
        PACKING,
    ),
    (
        "heads of a group taken for groups",
        "groups = heads // self.heads_per_group",
        "groups = self.heads_per_group",
        T_COMPOSE + "test_stage_weights",
        T_MODEL + "test_packed_documents_do_not_see_each_other",
        T_ATTENTION + "test_models_agree_in_logits_and_every_gradient",
        MAXTEXT + "[default]",
    ),
    (
        "groups may be cut",
        "        if width % per_group:\n",
        "        if width < 0:\n",
        T_MODEL + "test_tensor_parallelism_must_not_cut_groups",
    ),
    (
        "wide rows in the dtype of the keys",
        "dtype=torch.promote_types(states.dtype, dtype))",
        "dtype=states.dtype)",
        T_COMPOSE + "test_an_implementation_may_bring_its_own_generators",
    ),
    (
        "in-place generators while training",
        "kernels = None if torch.is_grad_enabled() else self._kernels(",
        "kernels = self._kernels(",
        T_COMPOSE + "test_an_implementation_may_bring_its_own_generators",
    ),
    (
        "std of the second layer without heads and ranks",
        '"qkw": 0.02 / (math.sqrt(2 * h * r) * (h + r)),',
        '"qkw": 0.02 / math.sqrt(2 * h * r),',
        T_COMPOSE + "test_initialization_is_the_papers",
    ),
    (
        "std of static projections from all heads",
        '"pre_static": 0.1 * math.sqrt(1 / m),',
        '"pre_static": 0.1 * math.sqrt(1 / h),',
        T_COMPOSE + "test_initialization_is_the_papers",
    ),
)

SAME_LAYER = T_CACHE + "test_same_as_the_librarys_layer"
_CACHE = _in(
    "cache",
    CACHE,
    (
        "a cache of other groups is taken",
        '"compose_rank", "compose_groups", ',
        '"compose_rank", ',
        T_GENERATION + "test_cache_of_another_model",
    ),
    (
        "rows that a compiled window turns are read after they are written",
        "held.copy_(held.index_select(2, places))",
        "held.index_copy_(2, self._rows_in_order(), held.clone())",
        T_GENERATION + "test_rows_of_a_compiled_window_go_to_their_places",
    ),
    (
        "a cache by its earlier name is lost",
        'kwargs["cache"] = given',
        "pass",
        T_CACHE + "test_a_cache_has_either_name",
    ),
    (
        "a cache that is None is a second one",
        "if given is not None:",
        "if True:",
        T_CACHE + "test_a_cache_has_either_name",
    ),
    (
        "the first of two caches is ignored",
        'if kwargs.get("cache") is not None:',
        "if False:",
        T_CACHE + "test_a_cache_has_either_name",
    ),
    (
        "a growing layer writes behind keys that something else has put there",
        "if rows is None or vars(self).get(name, rows.held) is not rows.held:",
        "if rows is None:",
        T_CACHE + "test_a_growing_layer_is_the_librarys",
    ),
    (
        "a growing layer writes outside inference mode to what was made inside",
        "memory.shape[2] or is_frozen:",
        "memory.shape[2]:",
        T_CACHE + "test_a_growing_layer_is_the_librarys",
    ),
    (
        "a window lends what the library keeps to take tokens back",
        "return not is_behind and keys.length",
        "return keys.length",
        T_CACHE + "test_windows_that_lend_no_room",
    ),
    (
        "a window lends behind tokens that something else has cut",
        "keys.length == min(self.cumulative_length, self.sliding_window - 1)",
        "bool(keys)",
        T_CACHE + "test_windows_that_lend_no_room",
    ),
    (
        "a window keeps a token too many",
        "keep = min(held, self.sliding_window - 1)",
        "keep = min(held, self.sliding_window)",
        T_CACHE + "test_a_window_that_lends_room_is_the_librarys",
    ),
    (
        "a window stays at the front of its memory",
        "_Rows(rows.memory, rows.first + length - keep, keep, None)",
        "_Rows(rows.memory, rows.first, keep, None)",
        T_CACHE + "test_a_window_that_lends_room_is_the_librarys",
    ),
    (
        "a window does not count what was lent",
        "        self.cumulative_length += length\n        held",
        "        held",
        T_CACHE + "test_a_window_that_lends_room_is_the_librarys",
    ),
    (
        "rows of another width are lent",
        "heads == shape[1] and channels == shape[3]",
        "heads == shape[1]",
        T_CACHE + "test_layers_that_lend_no_room",
    ),
    (
        "offloaded caches lend their memory",
        "not in (DynamicCache, StaticCache) or cache.offloading or",
        "not in (DynamicCache, StaticCache) or",
        T_CACHE + "test_layers_that_lend_no_room",
    ),
    (
        "a growing layer moves for every token",
        "room, held = max(LEAST_ROOM, length // ROOM_DIVISOR),",
        "room, held = 0,",
        T_CACHE + "test_a_growing_layer_seldom_moves",
    ),
    (
        "a growing layer writes in place while gradients are recorded",
        "        if torch.is_grad_enabled() or torch.compiler",
        "        if torch.compiler",
        T_CACHE + "test_gradients_go_through_a_growing_layer",
    ),
    (
        "a growing layer writes in place in graphs",
        "is_grad_enabled() or torch.compiler.is_compiling() or",
        "is_grad_enabled() or",
        T_CACHE + "test_in_graphs_a_growing_layer_adds_tokens_in_the_librarys_way",
    ),
    (
        "tokens that nobody has asked for since they were lent are lost where gradients are recorded",
        "            self._leave_memory()\n            return super().update",
        "            self._memory.clear()\n            return super().update",
        T_CACHE + "test_a_growing_layer_is_the_librarys",
    ),
    (
        "tokens that nobody has asked for since they were lent are lost when beams are chosen",
        "        self._leave_memory()\n        super().reorder_cache",
        "        self._memory.clear()\n        super().reorder_cache",
        T_CACHE + "test_a_growing_layer_is_the_librarys",
    ),
    (
        "copies of a growing layer write to its memory",
        '"values": self.values, "_memory": {}}',
        '"values": self.values, "_memory": dict(self._memory)}',
        T_CACHE + "test_a_growing_layer_is_the_librarys",
    ),
    (
        "what was given out is written to again",
        "        vars(self).pop(name, None)\n",
        "",
        T_CACHE + "test_a_window_that_lends_room_is_the_librarys",
    ),
    (
        "offloaded caches grow in place",
        "is not DynamicCache or cache.offloading or",
        "is not DynamicCache or",
        T_CACHE + "test_empty_layers_that_would_be_copied_for_every_token_are_replaced",
    ),
    (
        "the oldest token one too far",
        "oldest = (self.cumulative_length - self.max_cache_len).clamp",
        "oldest = (self.cumulative_length - self.max_cache_len + 1).clamp",
        SAME_LAYER,
    ),
    (
        "a full ring begins anew at its second row",
        "place = (self.cumulative_length % self.max_cache_len)",
        "place = ((self.cumulative_length + 1) % self.max_cache_len)",
        SAME_LAYER,
    ),
    (
        "the library gets the rows of a ring as they lie",
        "                held.copy_(held.index_select(2, rows))\n",
        "                pass\n",
        SAME_LAYER,
    ),
    (
        "rows of the library's are not put into a ring",
        "                held.copy_(held.index_select(2, places))\n",
        "                pass\n",
        SAME_LAYER,
    ),
    ("several tokens into a ring", "    if is_ring and shapes[0][2] > 1:\n", "    if False:\n", SAME_LAYER),
    (
        "first key one position early",
        "(self.cumulative_length - self.max_cache_len + 1).clamp(min=0)",
        "(self.cumulative_length - self.max_cache_len).clamp(min=0)",
        SAME_LAYER,
    ),
    (
        "first key before the beginning",
        "(self.cumulative_length - self.max_cache_len + 1).clamp(min=0)",
        "(self.cumulative_length - self.max_cache_len + 1)",
        SAME_LAYER,
    ),
    ("length not counted", "        self.cumulative_length.add_(1)\n", "", SAME_LAYER),
    ("length in Python not renewed", "        self._int_is_stale = True\n", "", SAME_LAYER),
    (
        "length as a tensor not renewed",
        "        self.cumulative_length.fill_(self.cumulative_length_int)\n",
        "",
        SAME_LAYER,
    ),
    ("not forgotten", "        super().reset()\n        self._int_is", "        self._int_is", SAME_LAYER),
    (
        "memory not kept in place",
        "            held.index_copy_(2, place, new)  # in place",
        "            setattr(self, 'keys' if new is key_states else 'values', held.index_copy(2, place, new))  # ",
        T_CACHE + "test_decoding_keeps_its_memory_in_place",
    ),
    (
        "capacity beyond what was asked for",
        "max_cache_len=layer.max_cache_len, sliding_window",
        "max_cache_len=sliding_window, sliding_window",
        T_CACHE + "test_only_sliding_and_empty_layers_are_replaced",
        "tests/test_export.py::test_cache_shorter_than_the_window",
    ),
    (
        "memory allocated ahead is lost",
        "        if layer.is_initialized:  # generate",
        "        if False:  # generate",
        T_CACHE + "test_only_sliding_and_empty_layers_are_replaced",
    ),
    (
        "cache of another batch accepted",
        "        if expected != found:\n",
        "        if expected[1:] != found[1:]:\n",
        T_MODEL + "test_cache_of_another_model",
    ),
    (
        "cache of another rank accepted",
        "        setattr(cache, _LAST_USER, (copy.deepcopy(user), bound))  # lists may change in place\n",
        "        pass\n",
        T_GENERATION + "test_cache_of_another_model",
    ),
    (
        "cache with a smaller window accepted",
        "if window is None or (held < window and",
        "if window is None or (False and",
        T_CACHE + "test_a_used_cache_and_another_window",
    ),
    (
        "static cache shorter than the window refused",
        "held >= max(whole)",
        "held > max(whole)",
        T_CACHE + "test_a_static_cache_of_any_window_is_right_or_refused",
    ),
    (
        "local layers alone lose keys without a word",
        "    if int(",
        "    if False and int(",
        T_CACHE + "test_a_static_cache_of_any_window_is_right_or_refused",
    ),
    (
        "local layers alone hold one token too many",
        "+ length > bound:",
        "+ length > bound + 1:",
        T_CACHE + "test_a_static_cache_of_any_window_is_right_or_refused",
    ),
    (
        "an emptied cache belongs to who filled it",
        "if wrong and int(cache.get_seq_length()):",
        "if wrong:",
        T_CACHE + "test_an_emptied_cache_is_anyones",
    ),
    (
        "layers looked at in every forward pass",
        "    if last_user != user:\n",
        "    if last_user is not user:\n",
        T_CACHE + "test_layers_are_looked_at_when_a_cache_comes_to_a_model_and_not_again",
    ),
)

_CONFIGURATION = (
    _in(
        "configuration",
        CONFIG,
        (
            "q/k norm has an epsilon of its own",
            "self.qk_norm_eps = self.norm_eps",
            "self.qk_norm_eps = 1e-6",
            T_CONFIG + "test_defaults_are_dcformer_405m",
        ),
        (
            "half of a head rotated in DCPythia",
            'kwargs.setdefault("partial_rotary_factor", 0.25)',
            'kwargs.setdefault("partial_rotary_factor", 0.5)',
            T_CONFIG + "test_dcpythia_defaults_are_dcpythia_2_8b",
        ),
        (
            "default window",
            "sliding_window: int | None = 256",
            "sliding_window: int | None = 255",
            T_CONFIG + "test_defaults_are_dcformer_405m",
        ),
        (
            "pattern not repeated",
            "period[i % len(period)]",
            "period[min(i, len(period) - 1)]",
            T_CONFIG + "test_layer_patterns",
        ),
        (
            "counts in patterns ignored",
            "for _ in range(int(count or 1))]",
            "for _ in range(1)]",
            T_CONFIG + "test_layer_patterns",
        ),
        (
            "window of one key accepted",
            "self.sliding_window < 2)",
            "self.sliding_window < 1)",
            T_CONFIG + "test_a_configuration_that_describes_no_model_is_refused_by_name_and_value",
        ),
        (
            "odd rotary dimension accepted",
            "if self.rotary_dim < 2 or self.rotary_dim % 2:",
            "if self.rotary_dim < 2:",
            T_CONFIG + "test_a_configuration_that_describes_no_model_is_refused_by_name_and_value",
        ),
        (
            "proportional RoPE pairs channels of a part of the head",
            'is_whole = rope.get("rope_type") == "proportional"',
            "is_whole = False",
            "tests/head_systems/test_head_models.py::test_shared_dims_shift_no_scores",
            T_EMBEDDINGS + "test_decoding_is_one_pass",
        ),
        (
            "epsilons that are NaN",
            "if (value := getattr(self, name)) is None or not 0 <= value < math.inf:",
            "if (value := getattr(self, name)) is None or value < 0 or value == math.inf:",
            T_CONFIG + "test_a_configuration_that_describes_no_model_is_refused_by_name_and_value",
        ),
        (
            "numbers of RoPE as text, NaN and infinite",
            "if not _is_finite(value) or not (value >= 0",
            "if _is_finite(value) and not (value >= 0",
            T_CONFIG + "test_rope_that_would_fail_or_be_nan_is_refused_by_name_and_value",
        ),
        (
            "numbers of RoPE of any size",
            "else value > bound):",
            "else True):",
            T_CONFIG + "test_rope_that_would_fail_or_be_nan_is_refused_by_name_and_value",
        ),
        (
            "numbers of RoPE that may be left out are needed",
            "if value is None and (name not in rope or name not in _ROPE_NOT_NONE[rope_type]):",
            "if name not in rope:",
            T_CONFIG + "test_rope_that_works_is_not_refused",
        ),
        (
            "a base of RoPE that is NaN",
            "if not _is_finite(theta) or theta <= 0:",
            "if not isinstance(theta, float | int) or theta <= 0:",
            T_CONFIG + "test_rope_that_would_fail_or_be_nan_is_refused_by_name_and_value",
        ),
        (
            "factors of longrope of any length",
            "if len(factors) != count or",
            "if not factors or",
            T_CONFIG + "test_rope_that_would_fail_or_be_nan_is_refused_by_name_and_value",
        ),
        (
            "dynamic RoPE divides by no channels",
            '(self.rotary_dim > 2, "a rotary',
            '(True, "a rotary',
            T_CONFIG + "test_rope_that_would_fail_or_be_nan_is_refused_by_name_and_value",
        ),
        (
            "undecided fields not stored",
            "return fields if self.undecided_fields is None else fields |",
            "return fields if True else fields |",
            T_HUB + "test_folders_whose_configuration_is_written_anew",
        ),
    )
    + _in(
        "configuration",
        HUB_CONFIG,
        (
            "query_wise turns off the query side",
            '        fields["compose_key"] = False\n',
            '        fields["compose_query"] = False\n',
            T_HUB_CONFIG + "query_wise_means_no_key_wise_composition",
        ),
        (
            "authors' q/k epsilon from the norms",
            '"qk_norm_eps": 1e-6, ',
            "",
            T_HUB_CONFIG + "norms_gates_biases_and_rope",
        ),
        (
            "a named pattern keeps the window",
            'fields["sliding_window"] = window if pattern is None else PATTERN_WINDOW',
            'fields["sliding_window"] = window',
            T_HUB_CONFIG + "windows",
        ),
        (
            "authors' activation of the generators",
            ', "compose_act": "gelu"',
            "",
            T_HUB_CONFIG + "norms_gates_biases_and_rope",
        ),
        (
            "authors' biases in attention only",
            'fields["attention_bias"] = fields["mlp_bias"] = take(',
            'fields["attention_bias"] = take(',
            T_HUB_CONFIG + "norms_gates_biases_and_rope",
        ),
        (
            "authors' number of gates",
            'take("mgate_dim", DEFAULT_GATES)',
            'take("mgate_dim", 40)',
            T_HUB_CONFIG + "norms_gates_biases_and_rope",
        ),
        (
            "undecided although stated",
            "is_stated = any(",
            "is_stated = all(",
            T_HUB_CONFIG + "static_projection",
            "tests/test_legacy_dcformer.py::test_only_hub_configurations_leave_fields_undecided",
        ),
    )
    + _in(
        "configuration",
        PARALLEL,
        (
            "tensor parallelism may cut groups",
            "if composed and config.compose_groups % size:",
            "if composed and config.num_attention_heads % size:",
            T_PARALLEL + "test_tensor_parallel_sizes_that_cut_nothing",
        ),
        (
            "tensor parallelism may cut key/value heads",
            "if config.num_key_value_heads % size:",
            "if config.num_attention_heads % size:",
            T_PARALLEL + "test_tensor_parallel_sizes_that_cut_nothing",
        ),
        (
            "multi-gate MLPs split",
            '"mlp.up_proj": not config.mlp_gates,',
            '"mlp.up_proj": True,',
            T_PARALLEL + "test_tensor_parallel_plan_names_only_what_exists",
        ),
    )
    + _in(
        "configuration",
        OVERHEAD,
        (
            "q/k norms not counted",
            " + 2 * d * config.qk_norm\n",
            "\n",
            T_OVERHEAD + "test_counts_of_other_architectures",
        ),
        (
            "static projections counted per group",
            "static = (config.compose_pre + config.compose_post) * h * m if",
            "static = (config.compose_pre + config.compose_post) * m * m if",
            T_OVERHEAD + "test_counts_of_every_switch_combination_are_those_of_the_built_model",
        ),
        (
            "static projections cost twice",
            "generate = 2 * parameters - 2 * layers * static * h * m",
            "generate = 2 * parameters",
            T_OVERHEAD + "test_flops_are_those_that_running_it_costs",
        ),
    )
    + _in(
        "configuration",
        COMPOSE,
        (
            "cache channels always padded",
            "return -(-used // 8) * 8",
            "return used // 8 * 8 + 8",
            T_CONFIG + "test_cache_channels",
        ),
        (
            "cache channels of one query head",
            "used = per_head * (self.num_attention_heads // self.cached_heads(stage, layer_idx))",
            "used = per_head",
            T_CONFIG + "test_cache_channels",
        ),
        (
            "sides lead the stages",
            "return tuple((stage, side) for stage in stages for side in sides)",
            "return tuple((stage, side) for side in sides for stage in stages)",
            T_CONFIG + "test_generators_keep_the_order_of_stored_tensors",
        ),
        (
            "sides without branches accepted",
            "if sides and not (self.compose_projection or self.compose_gate):",
            "if sides and not (self.compose_projection or self.compose_gate or self.compose_static):",
            T_CONFIG + "test_switch_combinations_are_accepted_exactly_when_they_describe_a_model",
        ),
    )
)

_HUB = (
    _in(
        "hub",
        LAYOUTS,
        (
            "second layer transposed",
            'compose + "qkw", "(g c x) (r m)"',
            'compose + "qkw", "(g c x) (m r)"',
            FOLDERS + "[fused]",
        ),
        (
            "generators lead the groups",
            'compose + "dw1_proj.weight", "(g c x) e"',
            'compose + "dw1_proj.weight", "(c g x) e"',
            FOLDERS + "[groups]",
        ),
        ("gates by head first", 'f"{prefix}e g (c m)"', 'f"{prefix}e g (m c)"', FOLDERS + "[fused]"),
        (
            "published static projections transposed",
            '"g m n", name, "(g m) n"',
            '"g m n", name, "(g n) m"',
            FOLDERS + "[static, use_sw]",
        ),
        (
            "gate and up swapped",
            '(("w1", "gate_proj"), ("w3", "up_proj"))',
            '(("w3", "gate_proj"), ("w1", "up_proj"))',
            FOLDERS + "[fused]",
        ),
        (
            "fused keys and values swapped",
            'for name, heads in (("q", "h"), ("k", "j"), ("v", "j"))\n        )\n        for name',
            'for name, heads in (("q", "h"), ("v", "j"), ("k", "j"))\n        )\n        for name',
            FOLDERS + "[fused]",
        ),
        (
            "stored generators by side",
            '(("pre", "query"), ("pre", "key"), ("post", "query"), ("post", "key"))',
            '(("pre", "query"), ("post", "query"), ("pre", "key"), ("post", "key"))',
            FOLDERS + "[query-wise]",
        ),
        (
            "first generators instead of those in use",
            "dimension_sizes(config, generators))[used]",
            "dimension_sizes(config, generators))[: len(used)]",
            FOLDERS + "[query-wise]",
        ),
        (
            "generators stored in the first places",
            "padded[used] = tensor",
            "padded[: len(used)] = tensor",
            T_HUB + "test_original_format",
        ),
    )
    + _in(
        "hub",
        HUB,
        (
            "parts share the whole's memory",
            "natives = [native.clone() for native in natives]",
            "natives = list(natives)",
            T_HUB + "test_loaded_tensors_are_independent",
        ),
        (
            "parameters not contiguous",
            "prefix + tail: native.contiguous()",
            "prefix + tail: native",
            T_HUB + "test_loaded_tensors_are_independent",
        ),
        (
            "names match by their beginning",
            'r"(\\d+)") + "(?!.)"',
            'r"(\\d+)")',
            T_HUB + "test_other_tensors_are_unexpected",
        ),
        (
            "tensors that the configuration knows nothing of",
            "if others := sorted(found.keys() - known):",
            "if others := sorted(found.keys() - found.keys()):",
            T_HUB + "test_tensors_that_the_configuration_knows_nothing_of",
        ),
        (
            "real static projections dropped in silence",
            "if not config.compose_static and not stored.has_static:",
            "if not config.compose_static:",
            T_HUB + "test_real_static_projections_are_not_dropped_in_silence",
        ),
        (
            "the last static projection decides",
            "if not stored.has_static and HUB_STATIC.fullmatch(name):",
            "if HUB_STATIC.fullmatch(name):",
            T_HUB + "test_one_real_projection_in_any_shard_is_enough",
        ),
        ("rank is the number of rows", '"compose_rank": rows // 2', '"compose_rank": rows', FOLDERS + "[rank]"),
        (
            "the caller's configuration is changed",
            "config = copy.deepcopy(config)",
            "config = config",
            T_HUB + "test_configuration_given",
        ),
        (
            "undecided after the tensors have told",
            "    config.undecided_fields = None\n",
            "",
            T_HUB_CONFIG + "static_projection",
        ),
        (
            "decided by the tensors although stated",
            "for name in config.undecided_fields or ():",
            "for name in fields:",
            T_HUB_CONFIG + "static_projection",
            "tests/test_legacy_dcformer.py::test_only_hub_configurations_leave_fields_undecided",
        ),
        (
            "authors' checkpoint without a tensor accepted",
            '    if missing:\n        raise ValueError(\n            f"{path} lacks',
            '    if False:\n        raise ValueError(\n            f"{path} lacks',
            T_HUB + "test_missing_tensor",
        ),
        (
            "authors' checkpoint without a head accepted",
            'if key.startswith(prefix) or key == "lm_head.weight")',
            "if key.startswith(prefix))",
            T_HUB + "test_missing_tensor",
        ),
        (
            "several ends of text replaced by one",
            "if current == own or (isinstance(current, list) and own in current):",
            "if current == own:",
            T_HUB + "test_agreeing_tokenizer_is_not_mentioned",
        ),
        (
            "tokens beyond the vocabulary",
            "for holder in holders if own < model.config.vocab_size else ():",
            "for holder in holders:",
            T_HUB + "test_nothing_to_learn_from_the_tokenizer",
        ),
        (
            "the last row of the vocabulary is beyond it",
            "if own < model.config.vocab_size else",
            "if own + 1 < model.config.vocab_size else",
            T_HUB + "test_tokens_are_taken_up_to_the_last_row_of_the_vocabulary",
        ),
        (
            "the caller's generation settings replaced",
            'if arguments.get("generation_config") is None and getattr',
            "if getattr",
            T_HUB + "test_generation_settings",
        ),
    )
    + _in(
        "hub",
        STORED,
        (
            "a damaged index is not named",
            "    except Exception as error:  # what the library",
            "    except (KeyError, OSError, RuntimeError) as error:  # what the library",
            "tests/test_loading.py::test_damaged_index",
        ),
        (
            "the damaged file is not named",
            "            raise (damaged if isinstance(damaged, error_class)",
            "            raise (error if isinstance(damaged, error_class)",
            "tests/test_loading.py::test_models_name_the_damaged_file",
        ),
        (
            "errors of the system lose their class",
            "(damaged if isinstance(damaged, error_class) else error_class(str(damaged)))",
            "error_class(str(damaged))",
            "tests/test_loading.py::test_what_the_system_says_of_a_file",
        ),
        (
            "a missing library is taken for damage",
            "    except ImportError:  # a library is missing",
            "    except ZeroDivisionError:  # a library is missing",
            "tests/test_loading.py::test_a_missing_library_is_no_damage",
        ),
        (
            "damage that torch takes for a wrong number is not named",
            "and not _raised_by_torch(error)",
            "",
            "tests/test_loading.py::test_one_byte_of_a_number",
        ),
        (
            "damage of a pickle that fails in another way",
            "    except Exception as error:  # a damaged pickle",
            "    except (EOFError, IndexError, KeyError, OSError, RuntimeError) as error:  # a damaged pickle",
            "tests/test_loading.py::test_one_byte_of_a_name",
        ),
        (
            "a head system is left out of a checkpoint",
            'if "head_system" in stored and not hasattr(',
            'if False and "head_system" in stored and not hasattr(',
            "tests/head_systems/test_head_images.py::test_loading_a_checkpoint_of_another_system_is_refused",
        ),
        (
            "damaged files in a subfolder are not found",
            '{**arguments, "local_files_only"',
            '{"local_files_only"',
            "tests/test_loading.py::test_models_name_the_damaged_shard",
        ),
        (
            "folded models are loaded without their maps",
            "        if name in MAP_FIELDS and here != there:\n",
            "        if False:\n",
            "tests/dha/test_dha_folding.py::test_a_folded_folder_is_the_model_folded_in_memory",
        ),
        (
            "code in a pickle is run",
            "weights_only=True",
            "weights_only=False",
            T_HUB + "test_code_in_a_pickle_is_not_run",
        ),
        (
            "looks at files that are not loaded",
            "names += [] if safe else [WEIGHTS_NAME, WEIGHTS_INDEX_NAME]",
            "names = ([] if safe else [WEIGHTS_NAME, WEIGHTS_INDEX_NAME]) + names",
            T_HUB + "test_safetensors_are_preferred",
        ),
    )
    + _in(
        "hub",
        TOKENS,
        (
            "special tokens map counts for less than the configuration beside it",
            'if "added_tokens_decoder" in settings else settings | mapped',
            'if "added_tokens_decoder" in settings else mapped | settings',
            T_HUB + "test_tokenizer_wins",
        ),
        (
            "null in a special tokens map counts for nothing",
            "else settings | mapped",
            "else settings | {k: v for k, v in mapped.items() if v is not None}",
            T_HUB + "test_null_in_a_map_of_tokens_takes_precedence",
        ),
        (
            "the end of text of a tokenizer in other files is not asked for",
            "if tokenizer is None and file is None and find_file(path",
            "if False and find_file(path",
            "tests/conversion/test_cli.py::test_a_tokenizer_in_other_files_beside_a_published_model",
        ),
        (
            "the end of text is what a tokenizer's class names, though no text has it",
            "if number < size or t in stored",
            "if True",
            "tests/conversion/test_cli.py::test_a_tokenizer_in_other_files_beside_a_published_model",
        ),
        (
            "added tokens of a tokenizer in other files are in no text",
            '{*vocabulary, *named.values(), *_tokenizer_file(path, "added_tokens.json", arguments)}',
            "{*vocabulary, *named.values()}",
            "tests/conversion/test_cli.py::test_a_tokenizer_in_other_files_beside_a_published_model",
        ),
        (
            "a tokenizer without a vocabulary is one",
            "if own and all(find_file(path, file, arguments) is None for file in ",
            "if () and all(find_file(path, file, arguments) is None for file in ",
            "tests/conversion/test_cli.py::test_files_that_make_no_tokenizer",
        ),
    )
)

_CONVERSION = (
    _in(
        "conversion",
        "formats/maxtext.py",
        (
            "MaxText's gate and up swapped",
            'mlp_{s}.wi_0.kernel", "e l f", native + "mlp.gate_proj.weight", "f e"),\n'
            '                row(layers + "mlp_{s}.wi_1.kernel", "e l f", native + "mlp.up_proj.weight", "f e"),',
            'mlp_{s}.wi_0.kernel", "e l f", native + "mlp.up_proj.weight", "f e"),\n'
            '                row(layers + "mlp_{s}.wi_1.kernel", "e l f", native + "mlp.gate_proj.weight", "f e"),',
            MAXTEXT + "[default]",
        ),
        (
            "MaxText's output projection by channel first",
            'row(theirs + "out.kernel", "h l d e", attention + "o_proj.weight", "e (h d)")',
            'row(theirs + "out.kernel", "h l d e", attention + "o_proj.weight", "e (d h)")',
            MAXTEXT + "[default]",
        ),
        (
            "MaxText's static projections transposed",
            '"g l m n", f"{attention}compose.{stage}_static", "(g m) n"',
            '"g l m n", f"{attention}compose.{stage}_static", "(g n) m"',
            MAXTEXT + "[static]",
        ),
        (
            "a window as long as a sequence stays local",
            "isinstance(window, int) and window >= longest",
            "isinstance(window, int) and window > longest",
            T_INFERENCE + "test_partial_configs",
            T_INFERENCE + "test_maxtext_yaml",
        ),
        (
            "MaxText's epsilon not that of q/k norms",
            'result["norm_eps"] = result["qk_norm_eps"] = float(',
            'result["norm_eps"] = float(',
            T_INFERENCE + "test_maxtext_yaml",
            T_INFERENCE + "test_partial_configs",
        ),
        (
            "MaxText's GELU is erf",
            '"gelu": "gelu_pytorch_tanh"',
            '"gelu": "gelu"',
            T_INFERENCE + "test_partial_configs",
        ),
        (
            "second moments are the parameters",
            '"nu": _nested(zeros)',
            '"nu": _nested(arrays)',
            T_CLI + "test_maxtext_options",
        ),
    )
    + _in(
        "conversion",
        "formats/pax.py",
        (
            "Pax's static projections transposed",
            '"l g m n", static, "(g m) n"',
            '"l g m n", static, "(g n) m"',
            PAX + "[DCPythia, padded vocabulary, static]",
        ),
        (
            "Pax's scales taken as they are",
            'offset = 1.0 if norm_type == "layernorm" else 0.0',
            "offset = 0.0",
            PAX + "[DCPythia without static]",
        ),
        (
            "epsilon of Pax's LayerNorms",
            '1e-5 if found.fields["norm_type"] == "layernorm" else 1e-6',
            "1e-6",
            PAX + "[DCPythia without static]",
            T_INFERENCE + "test_shapes_of_pax",
        ),
    )
    + _in(
        "conversion",
        "formats/base.py",
        (
            "Pax's scales written plus one",
            "tensor.double() - self.layout.offset",
            "tensor.double() + self.layout.offset",
            T_CONVERT + "test_dcpythia_to_pax",
        ),
        (
            "layers of a pattern's place taken in a row",
            "tuple(range(s, count, period))",
            "tuple(range(s * (count // period), (s + 1) * (count // period)))",
            MAXTEXT + "[default]",
            PAX + "[DCFormer++]",
        ),
        (
            "block and place swapped",
            "b=i // period, s=i % period",
            "s=i // period, b=i % period",
            T_CONVERT + "test_maxtext_without_scanned_layers",
        ),
        (
            "one block of all layers",
            "return next(p for p in range(1, count + 1) if count % p == 0 and kinds[:p] * (count // p) == kinds)",
            "return count",
            T_ROUND_TRIP + "test_options_that_do_not_apply",
        ),
        (
            "trainer's static projections in float32",
            '("compose.qkw", "compose.pre_static", "compose.post_static")',
            '("compose.qkw",)',
            T_CLI + "test_dtype_of_arrays",
        ),
    )
    + _in(
        "conversion",
        "conversion/convert.py",
        (
            "infinity passes",
            "all(bool(extreme.isfinite()) for extreme in flat.aminmax())",
            "not any(bool(extreme.isnan()) for extreme in flat.aminmax())",
            T_OUTPUT + "test_nonfinite_values",
        ),
        (
            "padded rows of ones",
            "joined.new_zeros(shape[0] - joined.shape[0], *shape[1:])",
            "joined.new_ones(shape[0] - joined.shape[0], *shape[1:])",
            T_CLI + "test_pax_options",
            T_CONVERT + "test_dcpythia_to_pax",
        ),
        (
            "dtype of the last tensor stands for all",
            "reduce(torch.promote_types, map(checkpoint.dtype, part.natives()))",
            "[*map(checkpoint.dtype, part.natives())][-1]",
            T_ROUND_TRIP + "test_layers_of_several_dtypes_lose_nothing",
        ),
        (
            "a token just beyond the vocabulary",
            "        if new >= config.vocab_size:",
            "        if new > config.vocab_size:",
            T_CLI + "test_tokens_beyond_the_vocabulary_are_not_taken",
        ),
    )
    + _in(
        "conversion",
        "conversion/checkpoint.py",
        (
            "stages that are off are not named",
            "if off := [name for name in SWITCHES if not getattr(model, name)]:",
            "if off := []:",
            "tests/conversion/test_inference.py::test_a_stage_without_a_static_projection_is_off_and_named",
        ),
        (
            "a damaged configuration beside taken for none",
            "if is_damaged and (",
            "if False and (",
            T_CLI + "test_a_damaged_configuration_beside_the_checkpoint",
        ),
        (
            "scales less one added in their own dtype",
            "tensor = (tensor.double() + part.layout.offset).to(self.dtype(name))",
            "tensor = (tensor + part.layout.offset).to(self.dtype(name))",
            T_INFERENCE + "test_bfloat16_scales_less_one_lose_nothing",
        ),
        (
            "the vocabulary's last rows kept",
            'tensor = tensor.narrow(part.dims.split().index("v"), 0, self.config.vocab_size)',
            'axis = part.dims.split().index("v")\n'
            "            size = self.config.vocab_size\n"
            "            tensor = tensor.narrow(axis, tensor.shape[axis] - size, size)",
            T_INFERENCE + "test_smaller_vocabulary",
            PAX + "[DCPythia, padded vocabulary, static]",
        ),
        (
            "tensors too many accepted",
            "        if extra:\n",
            "        if extra and missing:\n",
            T_CHECKPOINT + "test_unknown_array",
        ),
        (
            "a vocabulary too small taken for a padded one",
            "padded = info.shape[axis] > expected[axis]",
            "padded = info.shape[axis] != expected[axis]",
            T_CHECKPOINT + "test_wrong_shape",
            T_CHECKPOINT + "test_config_of_another_size",
        ),
    )
    + _in(
        "conversion",
        "conversion/inference.py",
        (
            "unused generators sought on another axis",
            'if "c" in letters)',
            'if "c" in letters) - 1',
            T_INFERENCE + "test_unused_generators_are_left_out",
        ),
        (
            "a missing head taken for tied embeddings",
            'if facts["tie_word_embeddings"] and not given.get("tie_word_embeddings"):',
            'if facts["tie_word_embeddings"] and given.get("tie_word_embeddings") is False:',
            T_CHECKPOINT + "test_missing_head_is_not_taken_for_tied_embeddings",
        ),
    )
    + _in(
        "conversion",
        "files.py",
        (
            "a file above the output is not named",
            "if isinstance(error, FileExistsError | NotADirectoryError) and error.filename is not None:",
            "if False:",
            T_OUTPUT + "test_impossible_outputs",
        ),
        (
            "a file two folders above the output is not named",
            "if isinstance(error, FileExistsError | NotADirectoryError) and error.filename is not None:",
            "if isinstance(error, FileExistsError) and error.filename is not None:",
            T_OUTPUT + "test_impossible_outputs",
        ),
        (
            "a file as output is nothing in the way",
            'return "is not a folder" if os.path.exists(path) else None',
            "return None",
            T_OUTPUT + "test_existing_output_and_leftovers",
            "tests/publish/test_publish.py::test_bad_models_outputs_and_sizes",
        ),
        (
            "two write one folder",
            "            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
            "",
            "tests/test_files.py::test_one_process_writes_a_folder",
        ),
        (
            "the old output does not come back",
            "                aside.rename(target)\n",
            "",
            T_OUTPUT + "test_the_old_output_comes_back_when_renaming_fails",
        ),
        (
            "a half-written file is kept",
            "        os.replace(unfinished, target)\n    finally:\n",
            "    finally:\n        os.replace(unfinished, target)\n",
            "tests/test_files.py::test_a_file_is_whole_or_as_it_was",
        ),
        (
            "temporary files of a killed process stay",
            "if _TEMPORARY.fullmatch(child.name):",
            "if False:",
            "tests/test_files.py::test_temporary_files_of_a_killed_process_do_not_stay",
        ),
        (
            "the files of others are taken for temporary ones",
            "if _TEMPORARY.fullmatch(child.name):",
            "if True:",
            "tests/test_files.py::test_temporary_files_of_a_killed_process_do_not_stay",
        ),
        (
            "torch's errors on a full disk are bugs",
            "return isinstance(error, RuntimeError) and _CUT_SHORT.search(str(error)) is not None",
            "return False",
            "tests/test_files.py::test_errors_of_the_system_are_known_by_any_name",
        ),
    )
    + _in(
        "conversion",
        "conversion/output.py",
        (
            "header not aligned",
            'text += b" " * (-len(text) % 8)',
            'text += b""',
            T_OUTPUT + "test_the_bytes_of_safetensors",
        ),
        (
            "tensors by name, narrow ones before wide ones",
            "key=lambda name: (order.index(tensors[name][1]), name)",
            "key=lambda name: name",
            T_OUTPUT + "test_the_bytes_of_safetensors",
        ),
        (
            "safetensors' errors on a full disk are bugs",
            "except (OSError, ValueError, SafetensorError) as error:",
            "except (OSError, ValueError) as error:",
            T_OUTPUT + "test_errors_leave_nothing",
        ),
        (
            "a source that cannot be read is an output that cannot be written",
            "    except DCFormerError:\n        raise\n    except BlockingIOError",
            "    except BlockingIOError",
            T_OUTPUT + "test_errors_leave_nothing",
        ),
    )
    + _in(
        "conversion",
        "conversion/verification.py",
        (
            "NaN is not a difference",
            'nan_to_num(nan=float("inf"), posinf',
            "nan_to_num(nan=0.0, posinf",
            T_VERIFY + "test_special_values",
        ),
        (
            "the last piece decides",
            "largest = max(largest, float(apart.max()) if apart.numel() else 0.0)",
            "largest = float(apart.max()) if apart.numel() else 0.0",
            T_VERIFY + "test_large_tensors_are_compared_to_their_end",
        ),
        (
            "groups are not decisive",
            '    "compose_groups",\n)',
            ")",
            T_VERIFY + "test_compositions_with_the_same_tensors",
        ),
        (
            "a token that is none is not named",
            'is none" if outside else',
            'is none" if False else',
            T_VERIFY + "test_bad_tokens",
        ),
        (
            "sides are not decisive",
            '    "compose_query",\n    "compose_key",\n',
            "",
            T_VERIFY + "test_compositions_with_the_same_tensors",
        ),
    )
    + _in(
        "conversion",
        "conversion/cli.py",
        (
            "a negative number of tokens is refused as if 0 were, too",
            "if args.num_tokens < 0:",
            "if False:",
            T_VERIFY + "test_lengths_are_refused_before_anything_is_compared",
        ),
    )
)

_KERNELS = (
    _in(
        "kernels",
        "kernels/generator.py",
        (
            "hooks on the generators' activation are left out",
            "if not linears or type(act_fn) not in APPROXIMATE or not has_no_hooks(act_fn):",
            "if not linears or type(act_fn) not in APPROXIMATE:",
            "tests/kernels/test_prepare.py::test_changes_between_two_steps_are_noticed",
        ),
        (
            "product not rounded",
            "    pair = rounded(pair, p_qkw.dtype.element_ty).to(tl.float32)\n",
            "",
            T_GENERATOR + "test_it_rounds_where_torch_rounds",
        ),
        (
            "norm without epsilon",
            "tl.rsqrt(tl.sum(pair * pair, axis=2) / M + EPS)",
            "tl.rsqrt(tl.sum(pair * pair, axis=2) / M)",
            T_GENERATOR + "test_small_and_large_inputs",
        ),
        (
            "padding left as it was",
            "tl.where(o_h % REP == REP - 1, PAD, 0)",
            "tl.where(o_h % REP == REP - 1, 0, 0)",
            T_GENERATOR + "test_weights_and_rows",
        ),
    )
    + _in(
        "kernels",
        "kernels/triton/heads.py",
        (
            "scores in one part are composed",
            "y = add_product(y, x[NB + i], m[i * NB + j])",
            "y = y",
            T_TAKEN + "[key-300]",
        ),
        (
            "matrices of scores in one part",
            "y = add_product(y, x[i], m[(NB + i) * NB + j])",
            "y = y",
            T_LARGE + "[random, 300]",
        ),
        (
            "scores in one part are widened",
            "add_product(product(x[NB + i], ones[i]), x[i], ones[i])",
            "product(x[i], ones[i])",
            T_LARGE + "[random, 150]",
        ),
    )
    + _in(
        "kernels",
        "kernels/triton/compose.py",
        (
            "what is not a number leaves a mark",
            "tl.where(top[i] > LOWEST, tl.abs(top[i]), 0.0)",
            "tl.where(is_seen, tl.abs(top[i]), 0.0)",
            T_MARKS + "test_what_is_not_a_number_leaves_no_mark[query]",
        ),
        (
            "queries that see what is not a number see nothing",
            " | (total[i] != total[i])  # a maximum",
            "  # a maximum",
            T_MARKS + "test_a_key_that_is_not_a_number[key-torch.float32]",
        ),
        (
            "parts that are not a number are nothing",
            "is_seen = total != 0",
            "is_seen = total > 0",
            T_ATTEND + "test_log_sum_exps_of_many_parts_are_joined",
        ),
        (
            "large scores are unseen",
            "tl.constexpr(-3.4028234e38)",
            "tl.constexpr(-1e30)",
            T_PRECISE + "test_very_large_scores_in_float32[1e+37]",
        ),
    )
    + _in(
        "kernels",
        "kernels/triton/products.py",
        (
            "queries that see nothing take keys of nobody",
            "    earliest = tl.minimum(earliest, high)  # of",
            "    # of",
            T_KERNEL + "[padding of whole tiles]",
        ),
    )
    + _in(
        "kernels",
        "kernels/triton/key_side.py",
        (
            "matrices beyond float16 become infinite",
            "    out = within(out, largest)\n",
            "",
            T_MARKS + "test_matrices_are_cut_off_until_the_mark_is_seen",
        ),
        (
            "matrices beyond float16 are not noticed",
            "        if tl.max(bound) > largest:",
            "        if tl.max(bound) < 0:",
            T_MARKS + "test_matrices_beyond_float16_are_noticed[key side]",
            T_MARKS + "test_matrices_after_the_softmax_beyond_float16_are_noticed[torch.float16]",
        ),
        (
            "gradients of matrices beyond float16 are not noticed",
            "            count += tl.sum((tl.abs(part) > most).to(tl.int32))\n",
            "",
            T_BEYOND + "[gradients of matrices-torch.bfloat16]",
        ),
    )
    + _in(
        "kernels",
        "kernels/triton/products.py",
        (
            "gradients of scores beyond float16 are not noticed",
            "tl.sum(is_cut.to(tl.int32))",
            "0",
            T_BEYOND + "[gradients of scores-torch.bfloat16]",
        ),
        (
            "gradients of scores beyond float16 are infinite",
            "tl.where(is_cut, tl.where(x > 0, most, -most), x)",
            "x",
            T_BEYOND + "[gradients of scores-torch.bfloat16]",
        ),
    )
    + _in(
        "kernels",
        "kernels/triton/scales.py",
        (
            "gradients as small as the loss is",
            "    exponent = tl.floor(tl.minimum(",
            "    exponent = 0.0 * tl.floor(tl.minimum(",
            T_PRECISE + "test_gradients_of_any_size_lose_nothing[-80]",
        ),
        (
            "gradients beyond float16 by composition",
            "tl.maximum(size + log2(amplified), ",
            "tl.maximum(size, ",
            T_BEYOND + "[composed gradients-torch.bfloat16]",
        ),
        (
            "small gradients beside large ones are lost unnoticed",
            "fewest, 0.0) < least_size",
            "fewest, 0.0) < -1000.0",
            T_BEYOND + "[queries with little-torch.bfloat16]",
        ),
    )
    + _in(
        "kernels",
        "kernels/triton/backward.py",
        (
            "sums of gradients before they are rounded",
            "        dp = cast(dp, dtype, H1)  # as",
            "        # as",
            T_PRECISE + "test_queries_that_see_one_key_have_no_gradients_of_scores[torch.bfloat16]",
        ),
    )
    + _in(
        "kernels",
        "kernels/prepare.py",
        (
            "parametrizations are left out",
            "    if type(compose) is not DCFormerCompose:",
            "    if False:",
            "tests/kernels/test_prepare.py::test_a_parametrized_static_projection_alone_is_noticed",
        ),
        (
            "values always in the first rows of a cache",
            "    p_values += i_row * stride_vn\n",
            "",
            T_STEP + "test_the_first_and_the_last_rows[growing-1]",
        ),
        (
            "channels of keys in the first rows of a cache",
            "        p_rows_0 += i_row * stride_rn_0 * UNIT\n",
            "",
            T_STEP + "test_the_first_and_the_last_rows[growing-1]",
        ),
        (
            "the host's row in a static cache",
            "        i_row = tl.load(p_place).to(tl.int64)\n",
            "",
            T_STEP + "test_the_first_and_the_last_rows[static-1]",
        ),
        (
            "a row too many fits into a static cache",
            "fits = i_row <= capacity - N",
            "fits = i_row <= capacity - N + 1",
            T_STEP + "test_a_static_cache_that_is_full_gives_nan",
        ),
        (
            "a full static cache is written past its end",
            "            i_row = tl.minimum(i_row, capacity - N)\n",
            "",
            T_STEP + "test_a_static_cache_that_is_full_gives_nan[35]",
        ),
        (
            "a ring's row is the token's number",
            "            i_row = i_row % capacity\n",
            "            i_row = tl.minimum(i_row, capacity - N)\n",
            T_STEP + "test_a_ring_is_read_as_it_lies",
        ),
    )
    + _in(
        "kernels",
        "kernels/step.py",
        (
            "query-side weights of the other stage",
            "of_queries.pop(0)",
            "of_queries.pop()",
            T_STEP + "test_without_causality",
        ),
        (
            "weights behind values read behind keys",
            "rows = memory[:, :, :rounded]",
            "rows = keys[:, :, :rounded]",
            T_STEP + "test_without_causality",
        ),
        (
            "parameters of another dtype or place are not noticed",
            "        return self.places == _places(self.given)\n",
            "        return True\n",
            T_STEP + "test_what_is_left_to_the_layer[_parameter_of_another_dtype]",
        ),
        (
            "norms of another eps are not noticed",
            'if getattr(query_norm, "eps", 0.0) != self.eps or',
            "if",
            T_STEP + "test_what_is_left_to_the_layer[_another_epsilon]",
        ),
        (
            "hooks on norms are not noticed",
            " and has_no_hooks(query_norm) and has_no_hooks(key_norm)):",
            "):",
            T_STEP + "test_what_is_left_to_the_layer",
        ),
        (
            "hooks on the activation are not noticed",
            "if not (has_no_hooks(act_fn) and has_no_hooks(compose)",
            "if not (has_no_hooks(compose)",
            T_STEP + "test_what_is_left_to_the_layer",
        ),
        (
            "a growing cache is read without its new tokens",
            "count = row + product.shape[1] if place is None",
            "count = row if place is None",
            T_STEP + "test_without_causality",
        ),
        (
            "a repeated launch has the first one's number of keys",
            '"S": count, "row": row',
            '"row": row',
            "tests/kernels/test_model.py::test_layers_repeat_the_launches_of_the_first[mha-fused]",
        ),
        (
            "torch does not know that a step has changed the cache",
            "    torch.autograd.graph.increment_version([x for x in (keys, values) if not x.is_inference()])\n",
            "",
            T_STEP + "test_where_nobody_watches_the_operator_is_left_out",
        ),
    )
    + _in(
        "kernels",
        "kernels/schemas.py",
        (
            "a mode that watches sees no decoding step",
            " or torch._C._len_torch_dispatch_stack() > 0:",
            ":",
            T_STEP + "test_where_nobody_watches_the_operator_is_left_out",
        ),
        (
            "subclasses of tensors see no decoding step",
            "return any(tensor is not None and type(tensor) is not torch.Tensor for tensor in tensors)",
            "return False",
            T_STEP + "test_subclasses_of_tensors_see_the_operator",
        ),
    )
    + _in(
        "kernels",
        "kernels/repeated.py",
        (
            "tensors that share memory lie on each other",
            "scratch += round_up(tensor.nbytes, _ALIGNMENT)",
            "scratch += _ALIGNMENT",
            T_REPEATED + "test_what_is_not_returned_shares_memory",
        ),
    )
    + _in(
        "kernels",
        "kernels/decode.py",
        (
            "a ring's mask as it lies",
            "o_s = tl.where(o_s < offset, o_s + S, o_s) - offset",
            "o_s = o_s + 0 * offset",
            T_STEP + "test_a_ring_is_read_as_it_lies",
        ),
        (
            "scores are composed while others are written",
            "scores * scale, mask=m_r[:, None] & (o_s < end)[None, :])\n    tl.debug_barrier()\n",
            "scores * scale, mask=m_r[:, None] & (o_s < end)[None, :])\n",
            T_DECODE + "test_number_of_splits[1]",
        ),
        (
            "composed scores replace those that others still read",
            "tl.debug_barrier()  # what was read above is overwritten below",
            "pass",
            T_DECODE + "test_each_switch",
        ),
        (
            "static maps of weights are read while they are written",
            "tl.store(p_tile, tile, mask=m_tile)\n                tl.debug_barrier()\n",
            "tl.store(p_tile, tile, mask=m_tile)\n",
            T_DECODE + "test_each_switch",
        ),
        (
            "composed weights meet values while others are written",
            "tl.store(p_tile, tile, mask=m_tile)\n    tl.debug_barrier()\n",
            "tl.store(p_tile, tile, mask=m_tile)\n",
            T_DECODE + "test_number_of_splits[1]",
        ),
        (
            "sums of splits with different maxima",
            "total = total * tl.exp(top - safe) + tl.sum(sums * tl.exp(tops - safe[None, :]), 0)",
            "total = total * tl.exp(top - safe) + tl.sum(sums, 0)",
            T_DECODE + "test_number_of_splits[1]",
        ),
        (
            "hidden maps go out with down",
            "_channel(p_key, m_key, pair, R + r, stride_wc, R, PAIRS)",
            "_channel(p_key, m_key, pair, r, stride_wc, R, PAIRS)",
            T_DECODE + "test_number_of_splits[1]",
        ),
        (
            "static map from column to row in decoding",
            "tl.load(p_static + j * M + o_m,",
            "tl.load(p_static + o_m * M + j,",
            T_DECODE + "test_shapes[groups]",
        ),
        (
            "heads that share a cached key far apart",
            "o_h // REP * stride_wh + o_h % REP * stride_wr",
            "o_h % REP * stride_wh + o_h // REP * stride_wr",
            T_DECODE + "test_packed_cache",
        ),
        (
            "splits behind the last key have keys",
            "last = tl.maximum(tl.minimum(first + split_len, S), first)",
            "last = tl.minimum(first + split_len, S)",
            T_DECODE + "test_operator_is_well_behaved",
        ),
        (
            "launches for every number of keys",
            "key.shape[1], rounded_length(S), S > 1, value",
            "key.shape[1], S, S > 1, value",
            "tests/kernels/test_model.py::test_layers_repeat_the_launches_of_the_first",
        ),
    )
    + _in(
        "kernels",
        "kernels/recording.py",
        (
            "a repeated pass keeps its memory to the end",
            "                tensors[number] = None\n",
            "                pass\n",
            T_RECORDING + "test_a_repeated_pass_is_the_pass",
        ),
        (
            "empty tensors are taken for one another",
            "memory = self._made.get(_storage(tensor))",
            "memory = next((m for m in self._made.values() if m.address == tensor.data_ptr()), None)",
            T_RECORDING + "test_nothing_to_do",
        ),
        (
            "a part of a recorded tensor without its place",
            "arguments[i] = addresses[number] + offset",
            "arguments[i] = addresses[number]",
            T_RECORDING + "test_steps_are_repeated_in_their_order",
        ),
        (
            "a part of memory that two tensors share is guessed",
            "if len(around) == 1:",
            "if around:",
            T_RECORDING + "test_parts_of_tensors_that_share_memory_are_not_guessed",
        ),
    )
    + _in(
        "kernels",
        "kernels/passes.py",
        (
            "a pass is repeated for one tensor given twice",
            "seen.high, tiles, geometry(tensors), *map(addresses.index, addresses),",
            "seen.high, tiles, geometry(tensors),",
            T_RECORDING + "test_the_same_tensor_twice_is_not_two_tensors",
        ),
        (
            "a pass from before a search is repeated after it",
            "tiles = (searches(), cache_file()) if autotune_is_on() else None",
            "tiles = None",
            T_RECORDING + "test_tiles_that_a_search_has_found_are_used",
        ),
        (
            "a repeated pass is kept, however long",
            "if made is None or len(made.steps) > _MOST_STEPS:",
            "if made is None:",
            T_RECORDING + "test_long_passes_are_not_kept",
        ),
        (
            "a pass is repeated with another scale",
            "self.layout, self.scale, self.chunk_bytes",
            "self.layout, self.chunk_bytes",
            T_RECORDING + "test_a_scale_and_chunks_decide",
        ),
    )
    + _in(
        "kernels",
        "kernels/launch.py",
        (
            "zeros of a repeated pass are what lay there",
            "self._do(torch.Tensor.zero_, zeros)",
            "zeros.zero_()",
            T_RECORDING + "test_a_repeated_pass_is_the_pass",
        ),
    )
    + _in(
        "kernels",
        "kernels/triton/precision.py",
        (
            "tanh near zero by a shorter series",
            "(2.0 / 15.0 - square * (17.0 / 315.0))",
            "(2.0 / 15.0)",
            T_GENERATOR + "test_tanh_is_accurate_relative_to_itself",
        ),
    )
    + _in(
        "kernels",
        "kernels/generator_backward.py",
        (
            "gradient of the norm without its mean",
            "scale * (grad - normed * along[:, :, None])",
            "scale * grad",
            T_GENERATOR + "test_gradients",
        ),
        (
            "gradients of another generator's gates",
            "i_gc * M + o_m[None, :]\n        tl.store",
            "i_gc % C * M + o_m[None, :]\n        tl.store",
            T_GENERATOR + "test_gradients",
        ),
    )
    + _in(
        "kernels",
        "kernels/repeated.py",
        (
            "launches of other alignment",
            "(t.shape, t.stride(), t.dtype, t.data_ptr() & 15)",
            "(t.shape, t.stride(), t.dtype)",
            T_REPEATED + "test_alignment_is_part_of_a_geometry",
        ),
        (
            "launches of other devices",
            "key = (device, numbers, self.key_of(tensors))",
            "key = (None, numbers, self.key_of(tensors))",
            T_REPEATED + "test_the_device_is_part_of_a_geometry",
        ),
        (
            "launches of other numbers",
            "key = (device, numbers, self.key_of(tensors))",
            "key = (device, (), self.key_of(tensors))",
            T_REPEATED + "test_a_repeated_launch_is_the_chosen_one",
        ),
        (
            "a tensor that is given twice is taken for one",
            "[None if t is None else t.detach() for t in tensors]",
            "list(tensors)",
            T_REPEATED + "test_a_repeated_launch_is_the_chosen_one",
        ),
        (
            "part of a tensor without its place",
            "addresses[number] + offset",
            "addresses[number]",
            T_REPEATED + "test_a_repeated_launch_is_the_chosen_one",
        ),
        (
            "what varies is what it was first",
            "arguments[i] = varying[name]",
            "pass",
            T_REPEATED + "test_what_varies_is_given_anew_and_chooses_nothing",
        ),
        (
            "a started kernel is compiled for any alignment",
            "key += (value.dtype, address % 16 == 0)",
            "key += (value.dtype,)",
            T_REPEATED + "test_a_started_kernel_is_that_of_like_arguments",
        ),
        (
            "a started kernel is compiled for any number",
            "            key.append(value)\n",
            "",
            T_REPEATED + "test_a_started_kernel_is_that_of_like_arguments",
        ),
        (
            "Triton decides whether products and sums are one instruction",
            "made = kernel[grid](**values, **options, **COMPILER)",
            "made = kernel[grid](**values, **options)",
            T_REPEATED + "test_every_kernel_may_fuse_products_and_sums",
        ),
        (
            "a started kernel is compiled for any device",
            "[id(kernel), device, *options.items()]",
            "[id(kernel), *options.items()]",
            T_REPEATED + "test_a_started_kernel_has_its_options_and_its_device",
        ),
    )
    + _in(
        "kernels",
        "kernels/triton/compose.py",
        (
            "keys behind those that all see are read where these begin",
            "jump = tl.where(i_s == inner, hole, 0)",
            "jump = tl.where(i_s == inner, 0, 0)",
            T_KERNEL + "[7 queries]",
        ),
        (
            "interval with its end",
            "visible = ((s + k >= first) & (s + k < last))[:, None]",
            "visible = ((s + k >= first) & (s + k <= last))[:, None]",
            T_KERNEL + "[7 queries]",
        ),
        (
            "turn of keys leaves its part",
            "start = s_0 + (start - s_0) // B_S * B_S",
            "start = start",
            T_KERNEL + "[a document of two parts]",
        ),
        (
            "keys that some see are taken to be seen by all",
            "tl.min(tl.where(m_t, last, NO_KEY))",
            "tl.max(tl.where(m_t, last, 0))",
            T_KERNEL + "[63]",
        ),
        (
            "keys that some see no more are taken to be seen by all",
            "tl.max(tl.where(m_t, first, 0))",
            "tl.min(tl.where(m_t, first, NO_KEY))",
            T_KERNEL + "[window 16]",
        ),
        (
            "keys behind those that all see are left out",
            "s += tl.where(i_s < inner, 0, hole)",
            "s += 0",
            T_KERNEL + "[63]",
        ),
        (
            "sums of earlier keys keep their scale",
            "new = total[i] * tl.exp2(top[i] - above[i])",
            "new = total[i]",
            T_KERNEL + "[7 queries]",
        ),
        (
            "log-sum-exps of parts added",
            "total = total * tl.exp2(top - base) + tl.sum(tl.exp2(part - base[None, :]), 0)",
            "total = total + tl.sum(tl.exp2(part - base[None, :]), 0)",
            "tests/kernels/test_attention.py::test_log_sum_exps_of_many_parts_are_joined",
        ),
    )
    + _in(
        "kernels",
        "kernels/triton/heads.py",
        (
            "second block of heads without the first",
            "if H1 > 0:\n                total += tl.sum(_times(x[1]",
            "if H1 < 0:\n                total += tl.sum(_times(x[1]",
            T_KERNEL + "[40 heads]",
        ),
        (
            "powers of two of down not undone in up",
            "_half(x[i] * more[:, None])",
            "_half(x[i])",
            T_KERNEL + "[all, bfloat16]",
        ),
        (
            "down in float16 as it is",
            "_half(x[i] * power(-exponent)[:, None])",
            "_half(x[i] * 1.0)",
            T_PRECISE + "test_powers_of_two_that_down_and_up_share_change_nothing",
        ),
        (
            "largest down of the first block alone",
            "largest = tl.maximum(largest, tl.max(tl.abs(x[1]), 1))",
            "largest = tl.maximum(largest, 0.0)",
            T_PRECISE + "test_the_largest_down_may_be_of_any_head[34]",
        ),
        (
            "large down in float16 as it is",
            "tl.minimum(tl.maximum(exponent, -126.0), 126.0)",
            "tl.minimum(tl.maximum(exponent, -126.0), 0.0)",
            T_PRECISE + "test_powers_of_two_that_down_and_up_share_change_nothing",
        ),
        (
            "composition weights cut off without a mark",
            "worst = tl.maximum(worst, _largest(x, H1) * more)",
            "worst = tl.maximum(worst, 0.0 * more)",
            T_MARKS + "test_composition_weights_beyond_float16_are_noticed_where_weights_are_small",
        ),
        (
            "queries that see nothing leave marks",
            "tl.max(tl.where(matters, worst, 0.0))",
            "tl.max(worst)",
            T_MARKS + "test_large_composition_weights_of_queries_that_see_nothing_leave_no_mark",
        ),
        (
            "infinite up in float16",
            "within(x, LARGEST_HALF).to(tl.float16)",
            "x.to(tl.float16)",
            T_MARKS + "test_composed_weights_beyond_float16_are_noticed",
        ),
        (
            "hidden maps in float16 of the first block alone",
            "hid = add_half_product(hid, x[1] *",
            "hid = add_half_product(hid, 0 * x[1] *",
            T_KERNEL + "[two blocks of heads, bfloat16]",
        ),
        (
            "transposed matrix in the order of the other",
            "block = tl.trans(m[j * NB + i])",
            "block = tl.trans(m[i * NB + j])",
            T_KERNEL + "[40 heads, static, rank 1]",
        ),
        (
            "what is not seen is multiplied",
            "all_1 = uniform(tl.where(count == all_1 - all_0, all_1, 0))",
            "all_1 = uniform(all_1)",
            T_KERNEL + "[every other 16 queries]",
        ),
    )
    + _in(
        "kernels",
        "kernels/balance.py",
        (
            "keys of a program are counted from the first that is seen",
            "max(0, first + low) // step * step",
            "max(0, first + low)",
            T_BALANCE + "test_lengths_hold_what_is_seen",
        ),
        (
            "tiles of scores have their own queries' keys only",
            "first = i // block * block",
            "first = i",
            T_BALANCE + "test_lengths_hold_what_is_seen",
        ),
        (
            "as many parts as keys",
            "ceil_div(count, n) <= parts",
            "n >= 1",
            T_BALANCE + "test_the_number_of_keys",
        ),
        (
            "programs of any number take one round",
            "ceil_div(programs, resident) *",
            "programs / resident *",
            "tests/tools/test_kernel_rounds.py::test_few_programs_end_together",
        ),
    )
    + _in(
        "kernels",
        "kernels/triton/backward.py",
        (
            "gradients of matrices of all keys in one place",
            "        p_m1 += stride_m\n        p_gm += stride_m\n",
            "        p_m1 += stride_m\n",
            T_KERNEL + "[7 queries]",
        ),
        (
            "softmax's gradient without its sum",
            "da = da + (p[i] * (dp[i] - delta[i]),)",
            "da = da + (p[i] * dp[i],)",
            T_KERNEL + "[7 queries]",
        ),
        (
            "weights are taken to sum to one",
            "tl.where(mass[i] > 0, tl.div_rn(total[i], mass[i]), 0.0)",
            "total[i]",
            T_KERNEL + "[40 heads]",
        ),
        (
            "sums of weights are read where the others are",
            "load_heads(p_sums + tl.cast(n_bh, tl.int64) * n_t, ",
            "load_heads(p_sums, ",
            T_KERNEL + "[7 queries]",
        ),
    )
    + _in(
        "kernels",
        "kernels/triton/key_side.py",
        (
            "gradients of matrices not turned",
            "h_stride: tl.constexpr = 1 if TRANSPOSED else HP",
            "h_stride: tl.constexpr = HP",
            T_KERNEL + "[post key]",
        ),
        (
            "parts of matrices' gradients that no query has written",
            "count, start, inner, at, seen, p_inverse, p_finite, B_T, BLOCK, True, False",
            "count, start, inner, at, seen, p_inverse, p_finite, B_T, BLOCK, False, False",
            T_KERNEL + "[window 5]",
        ),
        (
            "the first tile that all see is left out",
            "count, inner, outer, at",
            "count, inner + 1, outer, at",
            T_KERNEL + "[more queries]",
        ),
        (
            "heads that share a key far apart",
            "o_h // rep * stride_wh + o_h % rep * stride_wr",
            "o_h % rep * stride_wh + o_h // rep * stride_wr",
            T_KERNEL + "[grouped-query]",
        ),
    )
    + _in(
        "kernels",
        "kernels/triton/products.py",
        (
            "composed weights may be infinite",
            "if MARK:  # as where v is a copy",
            "if SCALED:  # as where v is a copy",
            T_MARKS + "test_composed_weights_beyond_float16_are_noticed[key.gate-False]",
        ),
        (
            "a factor of queries is not undone",
            "factor *= tl.load(p_undo + (t_0 + t) // ROWS)",
            "factor *= 1.0",
            T_PRECISE + "test_queries_and_keys_of_any_size_lose_nothing",
        ),
        (
            "all queries have the factor of the first",
            "p_undo + (t_0 + t) // ROWS",
            "p_undo + 0",
            T_PRECISE + "test_tokens_of_very_different_sizes_lose_nothing[grad]",
        ),
        (
            "a factor of values is not undone",
            "        total *= undo\n",
            "",
            T_PRECISE + "test_errors_in_16_bits_beside_those_of_eager[dtype0-8 heads, 48 tokens]",
        ),
        (
            "all keys have the largest factor",
            "return undo, uniform(tl.min(least)) >= undo",
            "return undo, undo > 0",
            T_PRECISE + "test_tokens_of_very_different_sizes_lose_nothing[key]",
        ),
        (
            "keys that nobody sees leave marks",
            "tl.where(is_seen, tl.max(tl.abs(x), 1), 0.0)",
            "tl.max(tl.abs(x), 1)",
            T_MARKS + "test_large_keys_that_nobody_sees_leave_no_mark[left padding]",
        ),
        (
            "scores of all parts of the keys begin at the first",
            "// B_S * B_S + i_s * n_keys\n",
            "// B_S * B_S\n",
            T_KERNEL + "[padding of whole tiles]",
        ),
        (
            "queries of a map lie beside each other",
            "return o_t // UNIT * (H * UNIT) + o_t % UNIT",
            "return o_t",
            T_KERNEL + "[everything]",
        ),
        (
            "query heads of a key counted once",
            "for i_r in range(0, rep):\n        i_q = i_h * rep + i_r  # a",
            "for i_r in range(0, 1):\n        i_q = i_h * rep + i_r  # a",
            T_KERNEL + "[grouped-query]",
        ),
    )
    + _in(
        "kernels",
        "kernels/triton/scales.py",
        (
            "keys share a factor by which small ones are lost",
            " & (least * power(shared) >= 1.0)",
            "",
            T_PRECISE + "test_tokens_of_very_different_sizes_lose_nothing[key]",
        ),
        (
            "keys share a factor by which large ones are infinite",
            "(largest * power(shared) < 2.0**15) & ",
            "",
            T_PRECISE + "test_copies_in_float16_keep_all_bits[large behind]",
        ),
        (
            "queries that see small values only are not noticed",
            "log2(tl.min(least_values))",
            "log2(value)",
            T_PRECISE + "test_tokens_of_very_different_sizes_lose_nothing[value]",
        ),
        (
            "rows that are not finite hide the others of their block",
            "-tl.maximum(largest, LEAST)",
            "-LEAST",
            T_MARKS + "test_values_that_are_not_finite_change_nothing_before_them[inf]",
        ),
        (
            "values that nobody sees decide about others",
            "low, high = _seen_keys(p_first, p_last, start, stop)",
            "low, high = 0, count",
            T_PRECISE + "test_tokens_that_nobody_sees_change_nothing[keys behind]",
        ),
        (
            "values of other chunks decide about a chunk's gradients",
            "is_here = (o < tl.cdiv(s_0 + n_s, B_N)) & (",
            "is_here = (",
            T_PRECISE + "test_values_beyond_a_chunk_change_no_gradients",
        ),
        (
            "tokens with small gradients are not noticed",
            "if least < largest * 2.0**-24:",
            "if least < -largest:",
            T_MARKS + "test_gradients_that_differ_much_between_tokens_are_noticed",
        ),
    )
    + _in(
        "kernels",
        "kernels/passes.py",
        (
            "gradient of scores without scale",
            "self._fill_values(chunk, grad_scores, sources.key, grads.query, self.scale, grad_scales)",
            "self._fill_values(chunk, grad_scores, sources.key, grads.query, 1.0, still)",
            T_KERNEL + "[7 queries]",
        ),
        (
            "kept maps are made anew",
            "        maps = self.kept_maps(kept, chunks)\n        grads",
            "        maps = self.kept_maps(None, chunks)\n        grads",
            T_KEPT + "test_maps_that_are_kept_change_nothing[bfloat16]",
        ),
    )
    + _in(
        "kernels",
        "kernels/launch.py",
        (
            "each part of the heads that share a key is all of them",
            "rep=shared // n_parts",
            "rep=shared",
            T_ATTEND + "test_heads_that_share_a_key_are_cut_into_parts_where_programs_are_few",
        ),
        (
            "both stages read the first one's query side",
            '"p_w1": post.query',
            '"p_w1": pre.query',
            T_KERNEL + "[7 queries]",
        ),
    )
    + _in(
        "kernels",
        "kernels/layout.py",
        (
            "heads that do not mix have as many groups as key heads",
            "range(max(1, least, ceil_div(heads, MAX_HEADS)), max(1, heads) + 1) if heads % n == 0",
            "range(max(1, least), max(1, heads) + 1) if heads % n == 0",
            T_REFUSED + "test_heads_that_do_not_mix_may_be_many",
        ),
        (
            "a scale that is infinite times log2(e) is taken",
            "_LARGEST_SCALE = torch.finfo(torch.float32).max * math.log(2)",
            "_LARGEST_SCALE = torch.finfo(torch.float32).max",
            T_REFUSED + "test_what_cannot_be_done_says_so",
        ),
    )
    + _in(
        "kernels",
        "kernels/problem.py",
        (
            "a search waits for the current device",
            "                with torch.cuda.device_of(self.q):  # by which",
            "                if True:  # by which",
            "tests/kernels/test_tuning.py::test_a_search_waits_for_the_device_of_its_tensors",
        ),
        (
            "only the first and the last chunk are looked at",
            "return self._most_bytes(cut(n_t), maps) <=",
            "return self._most_bytes([cut(n_t)[0], cut(n_t)[-1]], maps) <=",
            T_LAUNCH + "test_no_chunk_is_larger_than_its_bytes_whatever_its_queries_see",
        ),
        (
            "of chunks with as many queries the last one counts, not that with the most keys",
            "sorted(chunks, key=lambda chunk: chunk.n_s)",
            "chunks",
            T_LAUNCH + "test_no_chunk_is_larger_than_its_bytes_whatever_its_queries_see",
        ),
        (
            "kept maps are used when others are needed",
            "return self.keeps and (self.q.dtype == torch.float32 or not self.beyond)",
            "return self.keeps",
            T_KEPT + "test_kept_maps_are_made_anew_when_others_are_needed",
        ),
        (
            "kept maps of all chunks lie at the start",
            "kept[chunk.t_0 :].flatten()",
            "kept.flatten()",
            T_KEPT + "test_kept_maps_have_room",
        ),
        (
            "keys of a chunk end with its first query",
            "t_0 + n_t + self.visibility.high)), 16)",
            "t_0 + self.visibility.high)), 16)",
            T_KERNEL + "[chunks]",
        ),
        (
            "found tiles of composition may have other queries",
            "return found if found is not None and is_allowed(name, found, usual) else None",
            "return found",
            T_LAUNCH + "test_tiles_of_composition_are_those_that_maps_are_laid_out_by",
        ),
        (
            "tiles found for the usual maps serve others",
            "not self._is_widened and self.score_dtype == self.grad_dtype",
            "not self._is_widened",
            T_LAUNCH + "test_tiles_are_those_of_the_maps",
        ),
        (
            "tiles of maps in 16 bits serve those in float32",
            "self.score_dtype == self.grad_dtype\n        self._known.clear()",
            "self.score_dtype == self.grad_dtype",
            T_LAUNCH + "test_tiles_are_those_of_the_maps",
        ),
        (
            "float16 models leave float16 where scores are coarse",
            "needs_more = Beyond.SCORES in found",
            "needs_more = Beyond.SCORES in found or (self.q.dtype == torch.float16 and Beyond.PRECISION in found)",
            T_PRECISE + "test_large_scores_in_float16_models",
        ),
        (
            "scores in two parts with gradients in bfloat16",
            " or Beyond.PRECISION in found\n",
            "\n",
            T_PRECISE + "test_errors_in_bfloat16_after_a_mark[both]",
        ),
        (
            "gradients of static projections are sums of what float16 holds",
            "self.sums_exactly = self.splits_scores and",
            "self.sums_exactly = False and",
            T_LARGE + "[shared, 200, static]",
        ),
        (
            "matrices of scores are not counted as float32",
            "of_matrices += (of_scores - size) * wider",
            "of_matrices += 0 * wider",
            T_LAUNCH + "test_bytes_of_a_chunk_count_matrices",
        ),
    )
)

_MODELING = _in(
    "modeling",
    MODEL,
    (
        "layers in torch's checkpoint wrapper write to a cache twice",
        "runs_layers_twice = runs_twice(layers, self.training)",
        "runs_layers_twice = self.training and self.gradient_checkpointing and torch.is_grad_enabled()",
        T_MODEL + "test_layers_in_torchs_checkpoint_wrapper_fill_no_cache",
    ),
    (
        "smoothed labels are those of the same tokens",
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.__name__] = cls.__name__",
        "pass",
        T_MODEL + "test_smoothed_labels_are_those_of_the_next_tokens",
    ),
    (
        "accumulated batches of classifiers are added up",
        "accepts_loss_kwargs = False  # the library's",
        "accepts_loss_kwargs = True  # the library's",
        T_MODEL + "test_accumulated_batches_of_classifiers_are_one_batch",
    ),
    (
        "traced scores of head embeddings without their rest",
        ' or kwargs.get("compose_trace") is not None',
        "",
        T_EMBEDDINGS + "test_traced_scores_are_the_same_with_a_cache",
    ),
    (
        "remote decoders are saved without their code",
        'decoder.register_for_auto_class("AutoModel")',
        "pass",
        "tests/test_remote_code.py::test_every_head_loads_first",
    ),
    (
        "RoPE's frequencies rounded with the model",
        "if (moved := getattr(self, name)).dtype != exact.dtype:",
        "if (moved := getattr(self, name)) is None:",
        T_MODEL + "test_frequencies_of_rope_are_float32_whatever_the_model_is",
    ),
    (
        "RMS norm without epsilon",
        "self.weight.shape, eps=self.eps)",
        "self.weight.shape, eps=0.0)",
        T_MODEL + "test_every_switch_trains_saves_and_counts[default]",
        MAXTEXT + "[default]",
        PAX + "[DCFormer++]",
    ),
    (
        "RMS norm rounded behind its weight",
        "return self.weight * wide.to(x.dtype)",
        "return (self.weight * wide).to(x.dtype)",
        T_MODEL + "test_rms_norm_rounds_before_its_weight",
    ),
    (
        "layer norm without bias",
        "self.normalized_shape, weight, bias, self.eps)",
        "self.normalized_shape, weight, None, self.eps)",
        T_MODEL + "test_every_switch_trains_saves_and_counts[layernorm]",
        PAX + "[DCPythia without static]",
    ),
    (
        "epsilon of the norms fixed",
        "return norm_class(config.hidden_size, eps=config.norm_eps)",
        "return norm_class(config.hidden_size, eps=1e-6)",
        MAXTEXT + "[default]",
        PAX + "[DCPythia without static]",
    ),
    (
        "q norm with the layers' epsilon",
        "self.q_norm = DCFormerRMSNorm(self.head_dim, config.qk_norm_eps)",
        "self.q_norm = DCFormerRMSNorm(self.head_dim, config.norm_eps)",
        PAX + "[DCPythia without static]",
    ),
    (
        "sines without attention_scaling",
        "(angles.sin() * self.attention_scaling)",
        "angles.sin()",
        T_MODEL + "test_rotary_embeddings_are_the_librarys_and_scaled",
    ),
    (
        "cosines without attention_scaling",
        "(angles.cos() * self.attention_scaling)",
        "angles.cos()",
        T_MODEL + "test_rotary_embeddings_are_the_librarys_and_scaled",
    ),
    (
        "rotary pairs interleaved",
        "angles = torch.cat([angles, angles], dim=-1)",
        "angles = angles.repeat_interleave(2, dim=-1)",
        MAXTEXT + "[default]",
    ),
    (
        "frequencies over the whole head",
        "torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim",
        "torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.head_dim",
        PAX + "[DCPythia without static]",
    ),
    (
        "positions begin anew behind a cache",
        "device=hidden_states.device) + seen)[None]",
        "device=hidden_states.device))[None]",
        T_GENERATION + "test_crop[gqa]",
    ),
    (
        "activation on the wrong half of the MLP",
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "self.gate_proj(x) * self.act_fn(self.up_proj(x))",
        MAXTEXT + "[default]",
    ),
    (
        "gates not normalized over the gates",
        "self.multi_gate_proj(x).softmax(dim=-1, dtype",
        "self.multi_gate_proj(x).softmax(dim=-2, dtype",
        T_MODEL + "test_multi_gate_mlp_by_its_formula",
    ),
    (
        "slices of the gates interleaved",
        "hidden.unflatten(-1, (gates.shape[-1], -1)) * gates[..., None]",
        "hidden.unflatten(-1, (-1, gates.shape[-1])) * gates[..., None, :]",
        T_MODEL + "test_multi_gate_mlp_by_its_formula",
    ),
    (
        "scores scaled by the hidden size",
        "self.scaling = self.head_dim**-0.5",
        "self.scaling = config.hidden_size**-0.5",
        MAXTEXT + "[default]",
    ),
    (
        "q and k norm once more after RoPE",
        "return apply_rotary(query, *rope), apply_rotary(key, *rope), value",
        "return self.k_norm(apply_rotary(query, *rope)), self.k_norm(apply_rotary(key, *rope)), value",
        MAXTEXT + "[default]",
    ),
    (
        "value channels unpacked as a key's",
        'self.compose.unpack(value, value_width, "post", gather, heads)',
        'self.compose.unpack(value, value_width, "pre", gather, heads)',
        T_GENERATION + "test_continue_from_past_key_values",
    ),
    (
        "query heads counted before a head system has made them",
        "heads = query.shape[1] if self.keeps_shapes else None",
        "heads = query.shape[1]",
        "tests/head_systems/test_head_models.py::test_prefill_steps_and_implementations_agree",
    ),
    (
        "parallel MLP behind the attention",
        "mlp_input = hidden_states if self.parallel_residual else summed",
        "mlp_input = summed",
        PAX + "[DCPythia without static]",
    ),
    (
        "no hidden_dropout behind the attention",
        "summed = hidden_states + self.dropout(attended)",
        "summed = hidden_states + attended",
        T_MODEL + "test_hidden_dropout_is_on_all_that_a_layer_adds",
    ),
    (
        "no hidden_dropout behind the MLP",
        "return summed + self.dropout(self.mlp(self.post_attention_layernorm(mlp_input)))",
        "return summed + self.mlp(self.post_attention_layernorm(mlp_input))",
        T_MODEL + "test_hidden_dropout_is_on_all_that_a_layer_adds",
    ),
    (
        "documents of a packed row not told apart",
        "attention_mask, cache, position_ids)\n",
        "attention_mask, cache, None)\n",
        T_MODEL + "test_packed_documents_do_not_see_each_other[eager]",
    ),
    (
        "one row of padding is of the first sequence alone",
        "attention_mask = attention_mask.expand(hidden_states.shape[0], -1)",
        "pass",
        T_MODEL + "test_one_row_of_padding_for_all_sequences",
    ),
    (
        "every variant has the same attention",
        "attention_class = self.attention_class\n",
        "attention_class = DCFormerAttention\n",
        T_MODEL + "test_a_variant_changes_its_attention_only",
    ),
    (
        "composition initialized like all else",
        "if isinstance(module, DCFormerCompose):",
        "if module is None:",
        T_COMPOSE + "test_initialization_is_the_papers",
    ),
    (
        "saved under the authors' names unasked",
        'given.arguments.get("save_original_format", False)',
        'given.arguments.get("save_original_format", True)',
        FOLDERS + "[fused]",
    ),
) + _in(
    "modeling",
    ARGUMENTS,
    (
        "masks shorter than the text",
        "if mask.shape[1] < seen + length:",
        "if mask.shape[1] < length:",
        T_GENERATION + "test_a_mask_that_ends_before_the_tokens_is_refused",
    ),
    (
        "masks of other rows are taken",
        "if mask is not None and (mask.dim() not in (2, 4) or mask",
        "if mask is not None and (mask.dim() not in (2, 4) and mask",
        T_MODEL + "test_arguments_of_other_shapes_are_named",
    ),
    (
        "one mask for all sequences is refused",
        "mask.shape[0] not in (1, batch)",
        "mask.shape[0] != batch",
        T_MODEL + "test_arguments_for_every_sequence",
    ),
    (
        "one row of positions is refused",
        "not in ((1, length), (batch, length)):",
        "not in ((batch, length),):",
        T_MODEL + "test_arguments_for_every_sequence",
    ),
    (
        "ids of another rank are taken",
        "if hidden_states.dim() != 3:",
        "if False:",
        T_MODEL + "test_arguments_of_other_shapes_are_named",
    ),
    (
        "token id outside the vocabulary not named",
        "if not 0 <= number < size]",
        "if not 0 <= number]",
        T_MODEL + "test_token_id_out_of_range",
    ),
)

_GENERATION = _in(
    "generation",
    GENERATION,
    (
        "static cache of the library's sliding layers",
        "        use_static_layers(cache, self.config.sliding_window)\n",
        "",
        T_GENERATION + "test_compiled_static_decoding",
    ),
    (
        "a model left with the layers of its drafts",
        "            config.num_hidden_layers = layers\n",
        "            pass\n",
        T_GENERATION + "test_drafting_with_fewer_layers_leaves_the_model_its_layers",
    ),
    (
        "one width for keys and values",
        "if shape is None or len(parts) != 1:",
        "if shape is None:",
        T_GENERATION + "test_early_initialization_of_a_static_cache",
    ),
    (
        "generate makes its cache before it looks at the fields",
        "        self.model.running_layers()\n",
        "",
        T_SURGERY + "test_bad_fields_are_refused_by_name",
    ),
)

CHUNKED_IS_EAGER = T_ATTENTION + "test_chunked_is_eager_output_and_every_gradient"
_ATTENTION = _in(
    "attention",
    ATTENTION,
    (
        "a trace is lost where FSDP casts arguments",
        "class ComposeTrace:\n",
        "@dataclass\nclass ComposeTrace:\n    layers: Any = None\n",
        T_ATTENTION + "test_a_trace_is_filled_where_arguments_are_cast",
    ),
    (
        "attention under autocast",
        "with without_autocast(device):",
        "if True:",
        T_MODEL + "test_scores_stay_float32_under_autocast",
    ),
    (
        "rows that see nothing see everything",
        "return scores.softmax(dim=-1).masked_fill(empty, 0.0)",
        "return scores.softmax(dim=-1)",
        T_ATTENTION + "test_fully_masked_rows_give_zeros_and_no_gradient",
    ),
    (
        "additive masks only hide",
        "        scores = scores + bias.to(scores.dtype)\n",
        "        pass\n",
        CHUNKED_IS_EAGER,
    ),
    (
        "scores not scaled",
        "key.to(compute).transpose(-1, -2), key_heads) * scaling",
        "key.to(compute).transpose(-1, -2), key_heads)",
        CHUNKED_IS_EAGER,
    ),
    (
        "scores in the model's dtype",
        "matmul_shared(query.to(compute), key.to(compute).transpose(-1, -2), key_heads) * scaling",
        "matmul_shared(query, key.transpose(-1, -2), key_heads).to(compute) * scaling",
        T_ATTENTION + "test_low_precision_is_no_worse_than_computing_in_it",
        T_ATTENTION + "test_a_trace_holds_the_maps_of_the_definition",
    ),
    (
        "dropout while not training",
        "F.dropout(weights, p=dropout, training=module.training)",
        "F.dropout(weights, p=dropout)",
        T_ATTENTION + "test_dropout_drops_and_scales_independently",
        T_ATTENTION + "test_dropout_in_a_model",
    ),
    ("weights not composed", "weights, mix(weights, post))", "weights, weights)", CHUNKED_IS_EAGER),
    (
        "batches that do not fit",
        "query.shape[0] == key.shape[0] == value.shape[0]",
        "query.shape[0] == key.shape[0]",
        T_ATTENTION + "test_ill_fitting_shapes_are_refused",
    ),
)

_HEADS = _in(
    "attention",
    "heads_dcformer.py",
    (
        "rotated backwards",
        "torch.cat([-second, first], dim=-1)",
        "torch.cat([second, -first], dim=-1)",
        MAXTEXT + "[default]",
    ),
    (
        "key/value heads repeated in turn",
        "rows.unflatten(1, (count, -1)) if heads is None",
        "rows.unflatten(1, (-1, count)).transpose(1, 2) if heads is None",
        CHUNKED_IS_EAGER,
        MAXTEXT + "[LGLL, six heads]",
    ),
)

_HEADS += _in(
    "heads",
    "heads_dcformer.py",
    (
        "query heads in their own order behind shared keys",
        "states if self.is_consecutive else states.index_select(1, self.order)",
        "states",
        T_HEADS + "test_shared_products_are_those_with_copies",
    ),
    (
        "heads of a map read unequally",
        "if len(set(reads)) > 1:",
        "if False:",
        T_HEADS + "test_maps_that_do_not_fit_are_refused",
    ),
    (
        "mirrored keys rotated forwards",
        "back = apply_rotary(key[..., :rotated], cos, -sin)",
        "back = apply_rotary(key[..., :rotated], cos, sin)",
        T_EMBEDDINGS + "test_a_layer_is_an_ordinary_one_with_tied_weights",
    ),
    (
        "factors of channels that do not rotate left out",
        "factors = torch.cat([mean, mean, e[..., rotated:] + 1], dim=-1)",
        "factors = torch.cat([mean, mean, torch.ones_like(e[..., rotated:])], dim=-1)",
        T_EMBEDDINGS + "test_a_layer_is_an_ordinary_one_with_tied_weights",
    ),
    (
        "heads of a map put back in the order they were sorted in",
        "return states if self.is_consecutive else states.index_select(1, self.places)",
        "return states if self.is_consecutive else states.index_select(1, self.order)",
        T_HEADS + "test_shared_products_are_those_with_copies",
    ),
    (
        "gaps in a map",
        "if missing := sorted(set(range(count)) - set(row)):",
        "if missing := []:",
        T_HEADS + "test_maps_that_do_not_fit_are_refused",
    ),
    (
        "embeddings of normalized seeds as small as those of others",
        'is_normalized = config.qk_norm and name != "v_embedding"',
        "is_normalized = False",
        T_EMBEDDINGS + "test_heads_differ_at_first_as_much_as_ordinary_ones",
    ),
    (
        "Mul by the embedding itself",
        'seeds + own if mode == "add" else seeds * (own + 1)',
        'seeds + own if mode == "add" else seeds * own',
        T_EMBEDDINGS + "test_a_layer_is_an_ordinary_one_with_tied_weights",
        T_EMBEDDINGS + "test_without_embeddings_both_are_one_map_used_by_every_head",
    ),
    (
        "sines of the key's angle with the other sign",
        "second * e1 - first * e2",
        "first * e2 - second * e1",
        T_EMBEDDINGS + "test_a_layer_is_an_ordinary_one_with_tied_weights",
    ),
    (
        "half the difference without its sign on second channels",
        "torch.cat([difference, -difference], dim=-1)",
        "torch.cat([difference, difference], dim=-1)",
        T_EMBEDDINGS + "test_a_layer_is_an_ordinary_one_with_tied_weights",
    ),
    (
        "head maps beside head embeddings",
        '        if getattr(config, field) is not None:\n            raise ValueError(f"{field} does not go with',
        '        if False:\n            raise ValueError(f"{field} does not go with',
        T_EMBEDDINGS + "test_what_does_not_fit_is_refused",
    ),
    (
        "embeddings start as small as matrices",
        "config.initializer_range * math.sqrt(config.hidden_size)",
        "config.initializer_range",
        T_EMBEDDINGS + "test_heads_differ_at_first_as_much_as_ordinary_ones",
    ),
)
_HEADS += _in(
    "heads",
    MODEL,
    (
        "summands of channels that do not rotate left out under key-wise composition",
        "is_seen = (pre is not None and pre.key is not None)",
        "is_seen = False",
        T_EMBEDDINGS + "test_shared_keys_are_those_of_each_head_and_so_are_gradients",
    ),
    (
        "maps that are grouped-query attention's gathered for each query head",
        "if has_maps and not (keys.is_consecutive and keys.heads == values.heads):",
        "if has_maps:",
        T_HEADS + "test_consecutive_groups_keep_no_more_than_grouped_queries",
    ),
    (
        "a copy of the cache for each query head in every implementation",
        'if implementation in ("eager", CHUNKED):  # which read each head once',
        "if False:",
        T_HEADS + "test_decoding_reads_the_cache_where_it_is",
    ),
    (
        "cached values without their factors",
        'if is_cached and self.head_embeddings == "mul":',
        "if False:",
        T_EMBEDDINGS + "test_a_layer_is_an_ordinary_one_with_tied_weights",
    ),
)
_HEADS += _in(
    "heads",
    CACHE,
    (
        "values with as many heads as keys in a static cache",
        "if value_states.shape[1] != self.num_heads:",
        "if False:",
        T_HEADS + "test_a_static_cache_of_the_librarys_is_refused",
    ),
)

_MASKS = _in(
    "attention",
    MASKS,
    (
        "a copy of a mask begins with what kernels made of one",
        "        self.seen: dict | None = None\n",
        "        self.seen: dict | None = {}\n",
        T_MASKS + "test_a_copy_field_by_field_is_the_mask",
    ),
    (
        "masks are read while a program is traced",
        "torch.compiler.is_compiling() or torch.jit.is_tracing()",
        "torch.compiler.is_compiling()",
        T_MODEL + "test_jit_trace",
    ),
    (
        "rows of a mask made while a graph is traced",
        "        if not has_values(self.device):",
        "        if torch.device(self.device).type == 'meta':",
        T_CHUNKED + "test_dynamic_lengths_are_one_graph",
    ),
    (
        "masks are read while a graph is captured",
        "    return not is_captured(device)",
        "    return True",
        T_MASKS + "test_values_are_not_read_while_a_cuda_graph_is_captured",
    ),
    (
        "queries at the first keys",
        " + (key_length - query_length + 1)",
        " + 1",
        T_MASKS + "test_causal_rows_end_at_the_last_key",
    ),
    (
        "window of one key more",
        "(last - window).clamp(min=0)",
        "(last - window - 1).clamp(min=0)",
        T_MASKS + "test_causal_rows_end_at_the_last_key",
    ),
    (
        "only the very lowest number hides",
        "mask > torch.finfo(mask.dtype).min / 2, mask",
        "mask > torch.finfo(mask.dtype).min, mask",
        T_ATTENTION + "test_fully_masked_rows_give_zeros_and_no_gradient",
    ),
    (
        "last key of an interval",
        "keys - ones.flip(-1).argmax(-1)",
        "keys - ones.flip(-1).argmax(-1) - 1",
        T_MASKS + "test_gaps_are_found",
    ),
    (
        "gaps overlooked",
        "(last - first == count).all()",
        "(last - first == count).any()",
        T_MASKS + "test_gaps_are_found",
    ),
    (
        "a window forgotten by the mask",
        "is_causal, local_size, is_plain,",
        "is_causal, None, is_plain,",
        T_MASKS + "test_what_the_model_asks_for_is_what_the_mask_knows",
    ),
    (
        "padding taken for plain",
        "allow_is_causal_skip and aligned and _nothing_padded(attention_mask, kv_offset + kv_length)",
        "allow_is_causal_skip and aligned",
        T_MASKS + "test_a_mask_is_plain_only_where_causality_says_everything",
    ),
    (
        "columns that a mask lacks are seen",
        "return reaches and has_values",
        "return has_values",
        T_GENERATION + "test_columns_that_a_mask_lacks_are_hidden_by_all_implementations",
    ),
    (
        "every mask causal",
        'getattr(config, "is_causal", True) and not use_vmap',
        "True",
        T_MASKS + "test_what_the_model_asks_for_is_what_the_mask_knows",
    ),
    (
        "rows of the first queries",
        "q_offset=self.q_offset + start",
        "q_offset=self.q_offset",
        T_MASKS + "test_rows_are_rows_of_the_whole",
    ),
    (
        "a static cache's length read late",
        "q_offset = q_offset.clone()",
        "pass",
        T_GENERATION + "test_greedy_single_and_batched[gqa-large chunks, static]",
    ),
)

_OVERFLOW = _in(
    "kernels",
    "kernels/overflow.py",
    (
        "marks are memory of the caller's thread",
        "other.submit(_new_marks, device, is_awaited=True).result()",
        "_new_marks(device, is_awaited=True)",
        T_MARKS + "test_marks_are_memory_of_another_thread",
    ),
    (
        "a mark that is found while another is assumed is lost",
        "    with _lock:\n        before, calls =",
        "    if True:\n        before, calls =",
        "tests/kernels/test_overflow.py::test_a_mark_that_another_thread_finds_while_one_is_assumed_stays",
    ),
    (
        "what another thread assumed stays",
        "beyond(device) & ~(found & ~before)",
        "before | (beyond(device) & ~found)",
        "tests/kernels/test_overflow.py::test_marks_that_two_threads_assume_are_over_with_them",
    ),
    (
        "a self-check takes the passes whose marks are waited for",
        "                _watches[device].calls = calls\n",
        "                pass\n",
        "tests/kernels/test_overflow.py::test_passes_of_a_self_check_are_not_among_the_first",
    ),
)

_SELFCHECK = _in(
    "kernels",
    "kernels/selfcheck.py",
    (
        "a warning for every kind of layer whose check fails",
        '_warn_chunked(reason, f"self-check on {device}")',
        "_warn_chunked(reason)",
        "tests/test_default_attention.py::test_two_kinds_of_layers_that_fail_are_one_warning",
    ),
    (
        "a verdict of kernels for all marks",
        "known[0] == marks or _must_not_recheck(device)",
        "True",
        "tests/test_default_attention.py::test_after_a_mark_the_kernels_are_checked_again",
    ),
    (
        "kernels that follow a mark are checked without it",
        "with current, assumed(device, kind.beyond):",
        "with current:",
        "tests/kernels/test_selfcheck.py::test_kernels_that_follow_a_mark_are_checked",
    ),
) + _in(
    "kernels",
    "selfcheck.py",
    (
        "a device to use that the kernels refuse next",
        'named_device(options.device, "--device cpu, with TRITON_INTERPRET=1 set before the start")',
        "named_device(options.device)",
        "tests/test_default_attention.py::test_the_command_without_a_cuda_device_says_what_runs_on_a_cpu",
    ),
)

_PLAIN = _in(
    "attention",
    "plain_dcformer.py",
    (
        "without composition the first query of continued text is at the first key",
        "(is_square and is_open)",
        "is_open",
        T_ATTENTION + "test_without_composition_torch_attends",
    ),
    (
        "without composition windows are whole",
        "(not is_compiling and window >= key_length)",
        "(not is_compiling and window >= 2)",
        T_ATTENTION + "test_without_composition_torch_attends",
    ),
    (
        "torch's attention has parts of second derivatives",
        "return (*_Gradients.apply(grad_output, *ctx.saved_tensors, *ctx.options), None, None)",
        "return (*_Gradients.forward(ctx, grad_output, *ctx.saved_tensors, *ctx.options), None, None)",
        T_ATTENTION + "test_torchs_attention_has_no_second_derivatives",
    ),
)

_CHUNKED = _in(
    "attention",
    CHUNKED,
    (
        "query sides without the skip connection",
        "diagonal += 1 if self.query_gate is None else 1 +",
        "diagonal += 0 if self.query_gate is None else 0 +",
        CHUNKED_IS_EAGER,
    ),
    ("static projection transposed", "matrix += self.static.T", "matrix += self.static", CHUNKED_IS_EAGER),
    (
        "gradients through the matrix untransposed",
        "torch.bmm(matrix.flatten(0, 1).transpose(1, 2), grad.flatten(0, 1)",
        "torch.bmm(matrix.flatten(0, 1), grad.flatten(0, 1)",
        CHUNKED_IS_EAGER,
    ),
    (
        "hidden maps of the first head only",
        "for one, factor in others:",
        "for one, factor in others[:0]:",
        CHUNKED_IS_EAGER,
    ),
    (
        "the scaling missing from the query's gradient",
        "grad_q.mul_(self.scaling)",
        "grad_q",
        CHUNKED_IS_EAGER,
    ),
    (
        "gradients of shared keys from one query head only",
        "total.index_add_(1, self.kv_heads, grad)",
        "total[:, self.kv_heads] = grad",
        CHUNKED_IS_EAGER,
    ),
    (
        "keys of the block's first query only",
        "keys = self._aligned(some_from, max(some_from, some_to))",
        "keys = self._aligned(some_from, max(some_from, all_to))",
        CHUNKED_IS_EAGER,
    ),
    (
        "too much taken for visible",
        "clear = (all_from - keys.start, max(all_from, all_to) - keys.start)",
        "clear = (all_from - keys.start, max(all_from, some_to) - keys.start)",
        CHUNKED_IS_EAGER,
    ),
    (
        "what is clear is counted from keys that are not aligned",
        "clear = (all_from - keys.start, max(all_from, all_to) - keys.start)",
        "clear = (all_from - some_from, max(all_from, all_to) - some_from)",
        CHUNKED_IS_EAGER,
    ),
    (
        "aligned keys end too early",
        "min(self.key_length, stop + -stop % ALIGNMENT)",
        "min(self.key_length, stop - stop % ALIGNMENT)",
        CHUNKED_IS_EAGER,
    ),
    (
        "keys before the window",
        "for start, stop in ((0, min(low, width)), (min(high, width), width)):",
        "for start, stop in ((min(high, width), width),):",
        CHUNKED_IS_EAGER,
        T_ATTENTION + "test_the_window_is_w_keys_with_the_querys_own",
    ),
    (
        "rows that see nothing see something",
        "weights.masked_fill_(empty, 0.0)",
        "pass",
        T_ATTENTION + "test_fully_masked_rows_give_zeros_and_no_gradient",
    ),
    (
        "dropout of the forward pass alone",
        "grad = call.drop(grad, block, self.heads)",
        "grad = grad + 0",
        T_ATTENTION + "test_dropout_is_the_same_in_forward_and_backward",
    ),
    (
        "a gradient in the memory of the one that it is made from",
        "self.pre.back(call, first, maps.scores",
        "self.pre.back(call, second, maps.scores",
        T_ATTENTION + "test_each_branch_alone",
    ),
    (
        "dropped weights not made up for",
        "maps * (kept.to(maps.dtype) / (1 - self.dropout))",
        "maps * kept.to(maps.dtype)",
        T_ATTENTION + "test_dropout_drops_and_scales_independently",
        T_ATTENTION + "test_dropout_preserves_the_mean",
    ),
    (
        "weights of a few queries without the key side",
        "out = torch.addcmul(out, hidden, channels.select(4, rank + i))",
        "pass",
        CHUNKED_IS_EAGER,
    ),
    (
        "weights of a few queries with the static projection transposed",
        "static = weights.static.to(maps.dtype).transpose(1, 2)",
        "static = weights.static.to(maps.dtype)",
        CHUNKED_IS_EAGER,
    ),
    (
        "gates of a few queries without the maps",
        "out = torch.addcmul(out, a, channels.narrow(2, 2 * rank, 1))",
        "out = out + channels.narrow(2, 2 * rank, 1)",
        CHUNKED_IS_EAGER,
    ),
    (
        "gradients of groups in the place of others",
        "total[:, self.heads] = grad",
        "total[:, : grad.shape[1]] = grad",
        CHUNKED_IS_EAGER,
    ),
    (
        "gradients laid out as the weights are",
        "self.grads[name] = like.new_zeros(like.shape)",
        "self.grads[name] = torch.zeros_like(like)",
        T_CHUNKED + "test_operators_pass_opcheck",
    ),
    (
        "a mask of no keys is bounded",
        "if not self.key_length:\n            return []\n        bounds = []",
        "bounds = []",
        T_CHUNKED + "test_a_mask_of_no_keys",
    ),
    (
        "blocks of one thread where weights are dropped",
        "torch.get_num_threads() == 1 and not dropout",
        "torch.get_num_threads() == 1",
        T_ATTENTION + "test_one_thread_has_smaller_blocks_unless_it_drops_weights",
    ),
    (
        "small blocks of one thread for little work",
        "self.batch * heads * most * seen < ONE_THREAD_LEAST",
        "self.batch * heads * most * seen < 0",
        T_ATTENTION + "test_little_work_of_one_thread_stays_in_one_block",
    ),
    (
        "sequences that share a block of one thread, as many as of several",
        "min(shared, BLOCK_SCORES) // (row * size)",
        "BLOCK_SCORES // (row * size)",
        T_ATTENTION + "test_one_thread_has_smaller_blocks_unless_it_drops_weights",
    ),
    (
        "composed weights not rounded",
        "composed = composed.to(self.dtype).to(self.compute)",
        "pass",
        T_ATTENTION + "test_composed_weights_are_rounded_before_the_values",
    ),
    (
        "a mask read block by block",
        "found = torch.stack(bounds).tolist() if bounds else []  # the one look at the device\n"
        "        return [\n            replace(",
        "found = [bound.tolist() for bound in bounds]\n        return [\n            replace(",
        T_CHUNKED + "test_host_reads_do_not_grow_with_the_length",
    ),
    (
        "transforms not refused",
        "    refuse_transforms(CHUNKED, query, key, value, *weights)\n",
        "",
        T_CHUNKED + "test_transforms_name_eager",
    ),
    (
        "batched gradients not refused",
        "    refuse_batched(CHUNKED, grad_output)\n",
        "",
        T_CHUNKED + "test_batched_gradients_name_eager",
    ),
)

_LAYERS = _in(
    "modeling",
    MODEL,
    (
        "fields changed after a forward pass not looked at",
        "if traced or self._checked_kinds != (len(layers), number, window, types):",
        "if traced or self._checked_kinds is None:",
        T_SURGERY + "test_bad_fields_are_refused_by_name",
    ),
    (
        "kinds changed in place not looked at",
        "window, list(types))  # lists may change in place",
        "window, types)  # lists may change in place",
        T_SURGERY + "test_bad_fields_are_refused_by_name",
    ),
    (
        "empty trace of attention that holds no maps",
        "if compose_trace is not None:\n            raise ValueError(why_no_trace(",
        "if False:\n            raise ValueError(why_no_trace(",
        T_ATTENTION + "test_no_trace_of_plain_attention",
    ),
    (
        "head maps that do not match the configuration",
        "            self._check_head_maps()\n",
        "            pass\n",
        T_SURGERY + "test_head_maps_move_with_their_layers",
    ),
    (
        "the window of the layer's own configuration",
        "            sliding_window=sliding_window,\n            **kwargs,\n        )\n\n    def _for",
        "            sliding_window=self.config.sliding_window,\n            **kwargs,\n        )\n\n    def _for",
        T_SURGERY + "test_functions_of_the_library_get_the_window_of_the_place",
    ),
    (
        "windows of layers without a mask",
        "            sliding_window=sliding_window,\n            **kwargs,\n        )\n\n    def _for",
        "            **kwargs,\n        )\n\n    def _for",
        T_MODEL + "test_layers_without_a_mask_are_causal_and_keep_their_windows",
    ),
    (
        "the implementation of the layer's own configuration",
        "implementation = attn_implementation or self.config._attn_implementation",
        "implementation = self.config._attn_implementation",
        T_SURGERY + "test_a_layer_of_a_model_with_another_implementation",
    ),
    (
        "a layer's own place in the cache",
        "layer_idx = self.layer_idx if layer_idx is None else layer_idx",
        "layer_idx = self.layer_idx",
        T_SURGERY + "test_one_answer_after_surgery",
    ),
    (
        "checkpointing without gradients",
        "self._checkpoints and torch.is_grad_enabled()",
        "self._checkpoints",
        T_SURGERY + "test_generate_in_training_with_gradient_checkpointing_keeps_its_cache",
    ),
    (
        "a cache recomputed",
        "runs_layers_twice = runs_twice(layers, self.training)",
        "runs_layers_twice = True",
        T_SURGERY + "test_generate_in_training_with_gradient_checkpointing_keeps_its_cache",
    ),
)
_T = "tests/analysis/test_analysis_"
_ANALYSIS = (
    _in(
        "analysis",
        "analysis/terms.py",
        (
            "term: groups mix",
            "(low_rank * same_group).unsqueeze(dim)",
            "low_rank.unsqueeze(dim)",
            _T + "terms.py::test_terms_are_those_of_compose",
        ),
        (
            "term: map from column to row",
            '"jnr,mnr->njm"',
            '"jnr,mnr->nmj"',
            _T + "terms.py::test_terms_are_those_of_compose",
        ),
        (
            "term: key weights of the query",
            '(("q", weights.query, queries, 1), ("k", weights.key, keys, 0))',
            '(("q", weights.query, queries, 1), ("k", weights.key, queries, 0))',
            _T + "terms.py::test_terms_are_those_of_compose",
        ),
        (
            "term: gates left out",
            "if chosen_side.gate is not None:",
            "if False:",
            _T + "terms.py::test_terms_are_those_of_compose",
        ),
    )
    + _in(
        "kernels",
        "kernels/tuning.py",
        (
            "composition takes the products of sm_100 that have a memory of their own",
            "b_t, num_warps = (32, 2) if has_memory else (64, 4)",
            "b_t, num_warps = (64, 4)",
            "tests/tools/test_kernel_report.py::test_kernels_fit_gpus_that_came_later[100-0.88]",
        ),
        (
            "weights in bfloat16 have the registers of those in float16",
            'not (Beyond.GRADIENTS in beyond and kernel in ("compose", "weights"))',
            "True",
            "tests/kernels/test_tuning.py::test_more_programs_run_at_once_where_few_registers_suffice",
        ),
        (
            "a search tries no programs of two warps with fewer registers",
            "usual.num_warps <= 4",
            "usual.num_warps == 4",
            "tests/kernels/test_tuning.py::test_a_search_tries_room_for_more_programs",
        ),
        (
            "sm_120 has the tiles of sm_90",
            "return arch < 90 or arch >= 120\n",
            "return arch < 90\n",
            "tests/tools/test_kernel_report.py::test_kernels_fit_gpus_that_came_later[120-0.72]",
        ),
        (
            "later GPUs hold the query side of scores as sm_90",
            "(arch != 90 and numbers <= 64)",
            "(arch < 90 and numbers <= 64)",
            "tests/kernels/test_tuning.py::test_channels_that_are_held_in_16_bits",
        ),
    )
    + _in(
        "analysis",
        "analysis/tracing.py",
        (
            "trace: maps normalized",
            "self.maps[self.current] = LayerTrace(**kept)",
            "self.maps[self.current] = LayerTrace(**kept)\n"
            "            kept_maps = self.maps[self.current]\n"
            "            kept_maps.composed_weights = kept_maps.composed_weights.softmax(-1)",
            _T + "tracing.py::test_maps_are_those_of_compose_trace",
        ),
        (
            "trace: keeps all rows",
            "return tensor.detach().index_select(dim, torch.tensor(self.positions, device=tensor.device))",
            "return tensor.detach()",
            _T + "tracing.py::test_layers_and_positions",
        ),
    )
    + _in(
        "analysis",
        "analysis/diversity.py",
        (
            "roots of rounding count as singular values",
            "values.masked_fill(values < noise, 0)",
            "values.clamp(min=0)",
            _T + "diversity.py::test_what_has_no_full_rank",
        ),
        (
            "diversity: centered",
            "values = torch.linalg.eigvalsh(gram)",
            "gram = gram - gram.mean(0)\n    values = torch.linalg.eigvalsh(gram)",
            _T + "diversity.py::test_gram_form_is_the_svd",
        ),
        (
            "diversity: variance not squared",
            "curves.append((values.cumsum(1) / total).mean(0))",
            "curves.append((values.sqrt().cumsum(1) / values.sqrt().sum(1, keepdim=True)).mean(0))",
            _T + "diversity.py::test_gram_form_is_the_svd",
        ),
        (
            "diversity: sides of the stack swapped",
            'if form == "stack" else (flat_b, flat_a)',
            'if form != "stack" else (flat_b, flat_a)',
            _T + "diversity.py::test_gram_form_is_the_svd",
        ),
    )
    + _in(
        "analysis",
        "analysis/layers.py",
        (
            "parts of heads on several devices are analyzed",
            'if getattr(model, "tp_size", None) not in (None, 1):',
            "if False:",
            "tests/test_shards.py::test_analysis_refuses_heads_on_several_devices",
        ),
    )
    + _in(
        "analysis",
        "analysis/weights.py",
        (
            "weights in shards are read as they are",
            "gathered(tensor).detach()",
            "tensor.detach()",
            "tests/test_shards.py::test_analysis_reads_gathered_weights",
        ),
        (
            "circuits: theorem 2.2 as 2.1",
            'return self.pre if circuit == "qk" else self.post.T',
            'return self.pre if circuit == "qk" else self.post',
            _T + "diversity.py::test_gram_form_is_the_svd",
        ),
        (
            "circuits: grouped heads interleaved",
            "[head // shared for head in range(heads)]",
            "[head % (heads // shared) for head in range(heads)]",
            _T + "diversity.py::test_circuit_weights_are_those_of_attention",
        ),
    )
    + _in(
        "analysis",
        "analysis/maps.py",
        (
            "maps: first queries count",
            "[visible.sum(-1) > 1]",
            "[visible.sum(-1) > 0]",
            _T + "diversity.py::test_divergence_is_its_definition",
        ),
    )
    + _in(
        "analysis",
        "analysis/tracing.py",
        (
            "trace: padding is seen",
            "mask & self.real[:, None] & self.real[:, self.positions, None]",
            "mask.expand(len(self.real), -1, -1)",
            _T + "summary.py::test_summary_is_the_mean_of_breakdowns",
        ),
        (
            "trace: looks ahead unseen",
            'is_causal = getattr(attention, "is_causal", True) if is_causal is None else is_causal',
            'is_causal = getattr(attention, "is_causal", True)',
            _T + "tracing.py::test_visible_keys_are_those_that_have_weights",
        ),
        (
            "trace: NaN after the last attention passes",
            "if logits is not None and not logits.isfinite().all():",
            "if False:",
            _T + "tracing.py::test_nan_that_no_map_shows_is_named",
        ),
    )
    + _in(
        "analysis",
        "analysis/summary.py",
        (
            "summary: least weight of padding",
            ".movedim(1, -1)[visible]",
            ".movedim(1, -1).flatten(0, 2)",
            _T + "summary.py::test_the_least_weight_is_no_paddings",
        ),
        (
            "summary: flow into head from column",
            "inflow=others.sum(0)",
            "inflow=others.sum(1)",
            _T + "summary.py::test_summary_is_the_mean_of_breakdowns",
        ),
    )
    + _in(
        "analysis",
        "analysis/attribution.py",
        (
            "attribution: integral not weighted",
            "else g * weight for",
            "else g / steps for",
            _T + "attribution.py::test_complete_on_the_bundled_checkpoint",
        ),
        (
            "attribution: gradients times z, not the way from the baseline",
            "((z - b) * g).to(compute).sum(-1)",
            "(z * g).to(compute).sum(-1)",
            _T + "attribution.py::test_exact_on_a_model_linear_in_z",
        ),
        (
            "attribution: last position of padded rows",
            "logits.shape[1] - 1 - real.flip(1).long().argmax(1)",
            "logits.shape[1] - 1 + 0 * real.flip(1).long().argmax(1)",
            _T + "attribution.py::test_batches_and_padding",
        ),
    )
    + _in(
        "analysis",
        "analysis/interventions.py",
        (
            "ablation: gate of the projection's scale",
            "torch.where(is_up, projection, torch.where(is_gate, gate, factors))",
            "torch.where(is_up | is_gate, projection, factors)",
            _T + "interventions.py::test_a_trace_sees_the_ablation",
        ),
        (
            "ablation: hooks left behind",
            "            handle.remove()",
            "            pass",
            _T + "borrowing.py::test_ablation_and_patching",
        ),
    )
    + _in(
        "analysis",
        "analysis/html.py",
        (
            "head view: weights normalized",
            'found: dict[str, Any] = {"before": _floats(before[:, visible])}',
            'found: dict[str, Any] = {"before": _floats(before[:, visible] / before[:, visible].sum(0))}',
            _T + "html.py::test_numbers_are_those_of_the_trace",
        ),
    )
    + _in(
        "analysis",
        "analysis/plots.py",
        (
            "rows: rescaled to the largest",
            "image = _heat(axes, (values[numbers] * visible)[:, keys], colors, numbers=False)",
            "image = _heat(axes, (values[numbers] * visible)[:, keys] / values.abs().max(), colors, numbers=False)",
            _T + "plots.py::test_numbers_are_those_given",
        ),
    )
    + _in(
        "analysis",
        "analysis/maps.py",
        (
            "divergence of composed weights",
            'if metric == "js" and which != "weights":',
            'if metric == "js" and which not in ("weights", "composed_weights"):',
            _T + "diversity.py::test_composed_maps_are_no_probabilities",
        ),
    )
    + _in(
        "analysis",
        "analysis/circuits.py",
        (
            "copying: shares without sign",
            "return (values.sum().real / size).item()",
            "return (values.sum().abs() / size).item()",
            _T + "borrowing.py::test_a_copying_head",
        ),
        (
            "OV table: norm of the MLP in front of attention",
            "here.input_layernorm(x)",
            "here.post_attention_layernorm(x)",
            _T + "circuits.py::test_table_is_the_equation",
        ),
        (
            "copying: sizes of the real parts",
            "size = values.abs().sum()",
            "size = values.real.abs().sum()",
            _T + "circuits.py::test_scores_are_those_of_the_large_products",
        ),
    )
    + _in(
        "analysis",
        "analysis/cli.py",
        (
            "a converted model is loaded before it is refused",
            "if not is_own:",
            "if False:",
            _T + "cli.py::test_models_of_other_libraries_are_refused_before_they_are_loaded",
        ),
    )
)

T_DCMHA, T_CONVERTED = "tests/modules/test_dcmha.py::", "tests/modules/test_convert_attention.py::"
_MODULES = [
    *_in(
        "head systems",
        "loading.py",
        (
            "what modules of a subclass do is lost",
            "if path and own is not type(module):",
            "if False:",
            "tests/head_systems/test_head_models.py::test_what_subclasses_do_is_not_lost",
        ),
        (
            "modules that fully_shard has made are taken for a variant's",
            'if own.__name__.startswith("FSDP"):',
            "if False:",
            "tests/head_systems/test_head_models.py::test_what_subclasses_do_is_not_lost",
        ),
        (
            "modules of unrelated classes are taken for those of the model",
            "if path and own is not type(module):",
            "if path and issubclass(own, type(module)) and own is not type(module):",
            "tests/head_systems/test_head_models.py::test_what_replaced_modules_and_models_of_ones_own_do_is_not_lost",
        ),
        (
            "a class is taken for another of its name",
            "if path and own is not type(module):",
            "if path and own.__name__ != type(module).__name__:",
            "tests/head_systems/test_head_models.py::test_what_subclasses_do_is_not_lost",
        ),
        (
            "functions in the place of modules are lost",
            "own = type(modules.get(path))",
            "own = type(modules.get(path, module))",
            "tests/head_systems/test_head_models.py::test_what_replaced_modules_and_models_of_ones_own_do_is_not_lost",
        ),
        (
            "a module that several share is missed",
            "named_modules(remove_duplicate=False)",
            "named_modules()",
            "tests/head_systems/test_head_models.py::test_what_replaced_modules_and_models_of_ones_own_do_is_not_lost",
        ),
        (
            "a model's own forward is lost",
            "if type(model).forward is not model_class.forward:",
            "if False:",
            "tests/head_systems/test_head_models.py::test_what_replaced_modules_and_models_of_ones_own_do_is_not_lost",
        ),
    ),
    *_in(
        "head systems",
        "head_systems/attention_head_systems.py",
        (
            "head systems ignore a variant of composition",
            "        self.compose = self.compose_class(\n",
            "        self.compose = DCFormerAttention.compose_class(\n",
            "tests/head_systems/test_head_models.py::test_variants_of_composition_go_with_systems",
        ),
    ),
    *_in(
        "modules",
        "evaluation/sharing.py",
        (
            "lm-eval caches keys without their composition weights",
            "        if generates_without_cache(self.config):\n",
            "        if False:\n",
            "tests/evaluation/test_evaluation_cli.py::test_models_that_no_cache_has_room_for_generate_without",
        ),
        (
            "lm-eval asks the loader of converted models what class it is",
            "            self.AUTO_MODEL_CLASS = chosen\n",
            "            pass\n",
            "tests/evaluation/test_evaluation_cli.py"
            "::test_converted_encoder_decoders_keep_the_class_that_lm_eval_chooses",
        ),
    ),
    *_in(
        "head systems",
        "head_systems/convert.py",
        (
            "models in shards get a head system",
            '    refuse_shards(model, "convert it before that")\n',
            "",
            "tests/test_shards.py::test_what_changes_a_model_refuses_shards",
        ),
        (
            "adapters are lost on the way to a head system",
            "    refuse_other_parameters(model, source_class)\n",
            "",
            "tests/head_systems/test_head_models.py::test_parameters_that_would_be_lost_are_refused",
        ),
    ),
    *_in(
        "head systems",
        "head_systems/outputs_head_systems.py",
        (
            "what a wrapped decoder says is left with the wrapper",
            "    decoder._extras.clear()",
            "    decoder._extras = {}",
            "tests/head_systems/test_head_models.py::test_a_decoder_in_a_wrapper",
        ),
    ),
    *_in(
        "head systems",
        "head_systems/base.py",
        (
            "copies of a compiled system compute with the original's parameters",
            "super().__getstate__() | dict",
            "vars(self) | dict",
            "tests/head_systems/test_head_models.py::test_copies_of_compiled_parts_are_not_compiled",
        ),
    ),
    *_in(
        "head systems",
        "head_systems/modeling_head_systems.py",
        (
            "copies of a compiled decoder compute with the original's parameters",
            'super().__getstate__() | {"_extras": {}}',
            'vars(self) | {"_extras": {}}',
            "tests/head_systems/test_head_models.py::test_copies_of_compiled_parts_are_not_compiled",
        ),
    ),
    *_in(
        "cache",
        "fusion_dcformer.py",
        (
            "copies of a compiled layer compute with the original's parameters",
            "super().__getstate__() | {",
            "vars(self) | {",
            "tests/test_fusion_dcformer.py::test_copies_of_compiled_layers_are_not_compiled",
        ),
    ),
    *_in(
        "head systems",
        "head_systems/rank_heads.py",
        (
            "a text in place of a file with it ends with what the system says",
            "    except (OSError, UnicodeDecodeError) as error:",
            "    except UnicodeDecodeError as error:",
            "tests/head_systems/test_head_pruning.py::test_the_command_asks_for_a_file_with_text",
        ),
    ),
    *_in(
        "head systems",
        "head_systems/costs.py",
        (
            "training of head systems over all keys",
            "half, systems = length / 2,",
            "half, systems = length,",
            "tests/head_systems/test_head_costs.py::test_training_counts_the_causal_half_of_the_keys",
        ),
    ),
    *_in(
        "scaling",
        "scaling/points.py",
        (
            "a converted model is counted without its composition",
            "if is_converted(config):",
            "if False:",
            "tests/scaling/test_scaling_points.py::test_converted_models_are_refused",
        ),
        (
            "operations of short rows are counted at the context",
            "length = _mean_length(tokens, history, last)",
            "length = config and config.max_position_embeddings",
            "tests/scaling/test_scaling_points.py::test_operations_are_counted_at_the_length_of_rows",
            "tests/scaling/test_scaling_main.py::test_a_folder_of_short_rows_gives_the_factor_of_its_table",
        ),
        (
            "a row is as long as all of a step",
            "round(tokens * steps / (last * rows))",
            "round(tokens / last)",
            "tests/scaling/test_scaling_points.py::test_the_librarys_trainer_tells_the_length_of_rows",
        ),
    ),
    *_in(
        "training",
        "training/arguments.py",
        (
            "held-out documents are joined without packing",
            "if given.eval_packing and not (given.packing or given.padding_free):",
            "if False:",
            "tests/training/test_training_run.py::test_held_out_rows_are_packed_with_the_others_only",
        ),
        (
            "a list for an argument of the library's choices is a TypeError",
            '[*f.metadata["choices"]]',
            'f.metadata["choices"]',
            "tests/training/test_training_run.py::test_choices_in_a_file_are_those_of_the_command_line",
        ),
    ),
    *_in(
        "publish",
        "publish/folder.py",
        (
            "a head system of one's own is published",
            "if not is_of_package(system):",
            "if False:",
            "tests/publish/test_publish.py::test_head_systems_of_ones_own_are_refused",
        ),
    ),
    *_in(
        "training",
        "optimization.py",
        (
            "numbers of NumPy are not rates",
            "return isinstance(value, Real) and",
            "return isinstance(value, int | float) and",
            "tests/test_optimization.py::test_own_ratios_and_what_is_refused",
        ),
    ),
    *_in(
        "scaling",
        "scaling/points.py",
        (
            "head systems counted as plain attention",
            "parameters = count_parameters(config)",
            "parameters = count_parameters(DCFormerConfig.from_dict(config.to_dict()))",
            "tests/scaling/test_scaling_points.py::test_what_others_add_to_a_model_counts",
        ),
    ),
    *_in(
        "remote code",
        "remote_code.py",
        (
            "a system of one's own goes along without its code",
            "if not is_of_package(system):",
            "if False:",
            "tests/test_remote_code.py::test_systems_of_ones_own_are_refused",
        ),
    ),
    *_in(
        "modules",
        "modules/saving.py",
        (
            "the damaged file of a converted model is not named",
            "with naming_damage(folder, kwargs, DCFormerError):",
            "with naming_damage(None, kwargs, DCFormerError):",
            "tests/modules/test_convert_attention.py::test_folders_that_cannot_be_loaded",
        ),
        (
            "models without key-wise weights in self-attention generate without a cache",
            'settings.get("compose_key", True) is True',
            'settings.get("compose_key", True) is not False',
            "tests/evaluation/test_evaluation_cli.py::test_models_that_no_cache_has_room_for_generate_without",
        ),
        (
            "converted parts of parts are not noticed",
            "for inner in _converted_parts(part)]",
            "for inner in ()]",
            "tests/modules/test_convert_attention.py::test_a_folder_of_a_model_with_a_converted_part_says_so",
        ),
        (
            "programs load fused models without their mixtures of heads",
            "    refuse_mixtures(source, kwargs)\n",
            "",
            "tests/dha/test_dha_fusion.py::test_programs_do_not_load_a_fused_folder_without_its_mixtures",
        ),
        (
            "programs load converted models without their composition",
            "    if not is_converted(config):\n        return auto",
            "    if True:\n        return auto",
            "tests/modules/test_convert_attention.py::test_programs_load_any_model",
        ),
    ),
    *_in(
        "conversion",
        "formats/pax.py",
        (
            "the last norm alone says which norms there are",
            "has_biases = any(name.endswith(_NORM_BIASES) for name in names)",
            'has_biases = "final_ln.bias" in names',
            "tests/conversion/test_round_trip.py::test_a_missing_bias_of_the_last_norm_is_named",
        ),
    ),
    *_in(
        "conversion",
        "conversion/convert.py",
        (
            "a tokenizer in other files is left behind",
            'elif tokenizer is None and (Path(checkpoint) / "tokenizer_config.json").is_file():',
            "elif False:",
            "tests/conversion/test_cli.py::test_a_tokenizer_in_other_files_beside_a_published_model",
        ),
        (
            "a tokenizer that cannot be made is left out without a word",
            'opened.notes.append(f"no tokenizer is saved: {first_line(error)}")',
            "del error",
            "tests/conversion/test_cli.py::test_files_that_make_no_tokenizer",
        ),
        (
            "tokens that only the tokenizer's class names are taken into the configuration",
            "tokenizer_special_ids(path, {}, tokenizer).items()",
            "{n: (0, i) for n in TOKENS if (i := getattr(tokenizer, n)) is not None}.items()",
            "tests/conversion/test_cli.py::test_what_only_the_class_of_a_tokenizer_names_counts_where_its_file_has_it",
        ),
    ),
    *_in(
        "hub",
        "hub_dcformer.py",
    ),
    *_in(
        "modules",
        "analysis/cli.py",
        (
            "fused models are analyzed without their mixtures of heads",
            "    refuse_mixtures(folder)\n",
            "",
            "tests/analysis/test_analysis_cli.py::test_a_fused_folder_is_refused",
        ),
    ),
    *_in(
        "modules",
        "publish/folder.py",
        (
            "fused models are published without their mixtures of heads",
            "        refuse_mixtures(source)\n",
            "        pass\n",
            "tests/publish/test_publish.py::test_bad_models_outputs_and_sizes",
        ),
    ),
    *_in(
        "modules",
        "formats/base.py",
        (
            "fused models are converted without their mixtures of heads",
            "            refuse_mixtures(folder)\n",
            "            pass\n",
            "tests/conversion/test_cli.py::test_errors",
        ),
    ),
    *_in(
        "modules",
        "evaluation/cli.py",
        (
            "lengths beyond the context of other libraries' models get to lm-eval",
            "if longest is None or longest < 1:",
            "if not isinstance(config, dcformer.DCFormerConfig):",
            "tests/evaluation/test_evaluation_cli.py::test_found_before_the_model_is_loaded",
        ),
        (
            "texts beyond the context are refused where positions have no table",
            "if not is_length or (asked > longest and not has_rope):",
            "if not is_length or asked > longest:",
            "tests/evaluation/test_evaluation_cli.py::test_texts_beyond_the_context",
        ),
        (
            "tables of positions are not seen",
            "if not is_length or (asked > longest and not has_rope):",
            "if not is_length:",
            "tests/evaluation/test_evaluation_cli.py::test_texts_beyond_the_context",
        ),
        (
            "fused models are evaluated without their mixtures of heads",
            "    refuse_mixtures(source, where)\n",
            "",
            "tests/evaluation/test_evaluation_cli.py::test_found_before_the_model_is_loaded",
        ),
        (
            "converted models are evaluated as plain ones",
            "if is_converted(config) or int(",
            "if int(",
            "tests/evaluation/test_evaluation_cli.py::test_converted_models_are_evaluated_with_their_composition",
        ),
    ),
    *_in(
        "modules",
        "serving/server.py",
        (
            "models that generate nothing are not served",
            "if generates_without_cache(config) and loaded.can_generate():",
            "if generates_without_cache(config):",
            "tests/serving/test_serving.py::test_converted_models_are_served_with_their_composition",
        ),
        (
            "the server caches keys without their composition weights",
            "            if generates_without_cache(config) and loaded.can_generate():\n",
            "            if False:\n",
            "tests/serving/test_serving.py::test_models_that_no_cache_has_room_for_generate_without",
        ),
        (
            "requests ask for a cache that a model cannot have",
            "has_cache = not generates_without_cache(model.config)",
            "has_cache = True",
            "tests/serving/test_serving.py::test_models_that_no_cache_has_room_for_generate_without",
        ),
        (
            "fused models are served without their mixtures of heads",
            "            refuse_mixtures(model)\n",
            "",
            "tests/serving/test_serving.py::test_models_that_cannot_be_served",
        ),
        (
            "converted models are served as plain ones",
            "if config is None or not (is_ours or is_converted(config)):",
            "if not is_ours:",
            "tests/serving/test_serving.py::test_converted_models_are_served_with_their_composition",
        ),
    ),
    *_in(
        "modules",
        "training/run.py",
        (
            "rows grouped by length are resumed in another order",
            "            sampler.generator = self._order\n",
            "            pass\n",
            "tests/training/test_training_resume.py::test_rows_grouped_by_length_are_resumed_in_their_epoch",
        ),
        (
            "a stream is resumed in its first pass",
            "if batches and isinstance(self.train_dataset, IterableDataset):",
            "if False:",
            "tests/training/test_training_resume.py::test_a_stream_of_several_passes_is_resumed_in_its_pass",
        ),
        (
            "a resumed stream evaluates the end of its pass again",
            "            control.should_evaluate = False\n",
            "            pass\n",
            "tests/training/test_training_resume.py::test_a_stream_of_several_passes_is_resumed_in_its_pass",
        ),
        (
            "nobody is told that adapters need a larger vocabulary",
            "(changed := text_config.vocab_size) != size",
            "(changed := size) != size",
            "tests/training/test_training_run.py::test_adapters_of_a_vocabulary_that_changed",
        ),
        (
            "nobody is told that adapters need a smaller vocabulary",
            "(changed := text_config.vocab_size) != size",
            "(changed := text_config.vocab_size) > size",
            "tests/training/test_training_run.py::test_adapters_of_a_vocabulary_that_changed",
        ),
        (
            "nobody is told that adapters hardly train a composition",
            "if chosen.use_peft and is_converted(config) and",
            "if False and",
            "tests/training/test_training_run.py::test_a_composition_that_hardly_trains_is_told",
        ),
        (
            "tokenizers without an end get to TRL",
            "    check_special_tokens(tokenizer, taken, training, rows, held_out)\n",
            "",
            "tests/training/test_training_data.py::test_tokenizers_without_an_end",
        ),
        (
            "the end that comes with a chat template is not known",
            "check_special_tokens(tokenizer, taken, training, rows, held_out)",
            "check_special_tokens(tokenizer, None, training, rows, held_out)",
            "tests/training/test_training_data.py::test_tokens_that_come_with_a_chat_template",
        ),
        (
            "converted models are trained as plain ones",
            "partial(from_pretrained_any, auto_class=AutoModelForCausalLM)",
            "AutoModelForCausalLM.from_pretrained",
            "tests/training/test_training_run.py::test_converted_models_are_trained_with_their_composition",
        ),
    ),
    *_in(
        "modules",
        "modules/dcmha.py",
        (
            "padding is in the losses of a head system",
            "                self._padding = key_padding_mask if is_self else None",
            "                self._padding = None",
            "tests/modules/test_dcmha_head_systems.py::test_padding_is_not_in_the_losses",
        ),
        (
            "a mask of padding is kept that nothing reads",
            "if type(self.system).losses is not HeadSystem.losses:",
            "if True:",
            "tests/modules/test_dcmha_head_systems.py::test_nothing_of_a_call_is_in_copies",
        ),
        (
            "copies have the padding of the last call",
            'super().__getstate__() | {"_padding": None}',
            "super().__getstate__()",
            "tests/modules/test_dcmha_head_systems.py::test_nothing_of_a_call_is_in_copies",
        ),
        (
            "copies of a compiled module compute with the original's parameters",
            'super().__getstate__() | {"_padding": None}',
            'vars(self) | {"_padding": None}',
            "tests/modules/test_dcmha_head_systems.py::test_copies_of_compiled_modules_are_not_compiled",
        ),
        (
            "an overlap by the number of a layer that is not known",
            "            knows_layer=False,\n",
            "",
            "tests/modules/test_dcmha_head_systems.py::test_what_is_refused",
        ),
        (
            "the least values of a dtype hide",
            "return _hidden_by_inf(additive[0] if len(additive) == 1 else additive[0] + additive[1])",
            "return additive[0] if len(additive) == 1 else additive[0] + additive[1]",
            T_DCMHA + "test_the_least_values_of_a_dtype_are_added",
        ),
        (
            "key-wise weights of the queries' states",
            'states = {"query": query, "key": key}',
            'states = {"query": query, "key": query}',
            T_DCMHA + "test_a_key_changes_its_own_weights_only",
            T_DCMHA + "test_it_is_the_formula",
        ),
        (
            "nothing starts at zero",
            "parameter[:, parameter.shape[1] // 2 :] = 0  # [G·C·K, 2·R·M]: down, then up",
            "pass",
            T_DCMHA + "test_without_composition_it_is_the_librarys",
        ),
        (
            "both halves start at zero",
            "parameter[:, parameter.shape[1] // 2 :] = 0  # [G·C·K, 2·R·M]: down, then up",
            "parameter.zero_()",
            T_DCMHA + "test_zero_init_can_learn",
        ),
        (
            "causal without a mask",
            "            is_causal=False,\n",
            "            is_causal=True,\n",
            T_DCMHA + "test_without_composition_it_is_the_librarys",
        ),
        (
            "batch first always",
            "elif not self.batch_first:\n            query, key, value",
            "elif False:\n            query, key, value",
            T_DCMHA + "test_without_composition_it_is_the_librarys",
        ),
        (
            "training mode forgotten",
            "return made.train(module.training)",
            "return made",
            T_DCMHA + "test_settings_of_the_module_are_taken_over",
        ),
    ),
    *_in(
        "modules",
        "compose_dcformer.py",
        (
            "weights of no token",
            "hidden.view(batch * length, hidden.shape[-1] // k, k)",
            "hidden.view(batch * length, -1, k)",
            T_DCMHA + "test_nothing_to_attend",
        ),
    ),
    *_in(
        "modules",
        "modules/saving.py",
        (
            "a composition is loaded into shards",
            'refuse_shards(model.get_submodule(name.rpartition(".")[0]), ',
            '(model.get_submodule(name.rpartition(".")[0]), ',
            "tests/test_shards.py::test_what_changes_a_model_refuses_shards",
        ),
        (
            "composition of other sizes is left as memory was",
            "if others := sorted(key for key in info",
            "if others := sorted(key for key in () and info",
            "tests/modules/test_convert_attention.py::test_folders_that_cannot_be_loaded",
        ),
        (
            "fields of a configuration are left out",
            "return_unused_kwargs=True, **hub, **kwargs)",
            "return_unused_kwargs=True, **hub)",
            T_CONVERTED + "test_loading_takes_fields_of_the_configuration",
        ),
        (
            "any class loads",
            "if not isinstance(config, takes := model_class.config_class or object):",
            "if (takes := model_class.config_class or object) is None:",
            T_CONVERTED + "test_folders_that_cannot_be_loaded",
        ),
    ),
    *_in(
        "modules",
        "modules/key_weights.py",
        (
            "key-wise weights stay when a cache is reset",
            "        super().reset()\n        self.key_weights = {}",
            "        super().reset()",
            T_CONVERTED + "test_encoder_states_are_not_kept_by_a_cache",
        ),
        (
            "key-wise weights stay in the order of other beams",
            "packed.index_select(0, beam_idx.to(packed.device))",
            "packed",
            T_CONVERTED + "test_key_wise_weights_follow_the_keys_of_a_cache",
            T_CONVERTED + "test_a_static_cache_that_is_reset_has_weights_of_what_fills_it_then",
        ),
        (
            "key-wise weights are repeated as a whole, and not each",
            "packed.repeat_interleave(repeats, dim=0)",
            "packed.repeat(repeats, 1, 1, 1)",
            T_CONVERTED + "test_key_wise_weights_follow_the_keys_of_a_cache",
        ),
        (
            "key-wise weights of other sequences than those selected",
            "packed[indices]",
            "packed[: len(indices)]",
            T_CONVERTED + "test_key_wise_weights_follow_the_keys_of_a_cache",
        ),
    ),
    *_in(
        "modules",
        "modules/interface.py",
        (
            "a plain load of a converted folder attends without composition",
            'if call is None and type(getattr(getattr(module, "config", None), "dcmha", None)) is dict:',
            "if False:",
            T_CONVERTED + "test_a_plain_load_that_names_our_attention_is_refused",
        ),
        (
            "of a compiled model that generates without a cache the compiled one is changed",
            '    model = getattr(model, "_orig_mod", model) ',
            "    model = model ",
            "tests/evaluation/test_evaluation_cli.py::test_models_that_no_cache_has_room_for_generate_without",
        ),
        (
            "a program that asks for a cache gets one, which has no room for keys' composition weights",
            'kwargs | {"use_cache": False}',
            "kwargs",
            "tests/evaluation/test_evaluation_cli.py::test_models_that_no_cache_has_room_for_generate_without",
        ),
        (
            "the library's default of a cache stays",
            "    model.generation_config.use_cache = False\n",
            "",
            "tests/serving/test_serving.py::test_models_that_no_cache_has_room_for_generate_without",
        ),
        (
            "hooks behind that of composition stay in silence",
            "values())) is not compose_hook:",
            "values())) is None:",
            "tests/modules/test_convert_attention.py::test_hooks_behind_that_of_composition_are_warned_of",
        ),
        (
            "hooks behind that of composition are warned of at each layer",
            '"a forward pre-hook of attention was',
            'f"{call.path}: a forward pre-hook of attention was',
            "tests/modules/test_convert_attention.py::test_hooks_behind_that_of_composition_are_warned_of_once",
        ),
        (
            "weights made for another module",
            "weights = weights if owner is module else None",
            "weights = weights",
            T_CONVERTED + "test_weights_of_one_call_serve_no_other",
        ),
        (
            "weights left for the next call",
            "        _slot.weights = (None, None)\n        weights = weights if",
            "        weights = weights if",
            T_CONVERTED + "test_weights_of_one_call_serve_no_other",
        ),
        (
            "states of a grid of tokens",
            "    if states.dim() > 3:  # a grid",
            "    if False:  # a grid",
            T_CONVERTED + "test_without_composition_it_is_the_model",
        ),
        (
            "key-wise weights of the last encoder states",
            "if (states is None or has_keys) and layer",
            "if layer",
            T_CONVERTED + "test_a_call_that_fails_leaves_no_weights_to_the_next",
        ),
        (
            "key-wise weights of the states at hand, and not of the keys in the cache",
            "cache.is_updated.get(index)",
            "False",
            T_CONVERTED + "test_key_wise_weights_follow_the_keys_of_a_cache",
        ),
        (
            "cross-attention without states or weights goes on",
            '    if states is None:\n        raise ValueError(\n            f"{path}: converted as cross',
            '    if states is cache:\n        raise ValueError(\n            f"{path}: converted as cross',
            T_CONVERTED + "test_layers_of_a_cache_that_cannot_hold_key_wise_weights",
        ),
        (
            "position bias without its mask",
            'bias.masked_fill(~mask.bool(), float("-inf"))',
            "bias",
            T_CONVERTED + "test_masks_beside_a_position_bias",
        ),
        (
            "scaling of the module",
            "scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,",
            "scaling=query.shape[-1] ** -0.5,",
            T_CONVERTED + "test_without_composition_it_is_the_model",
        ),
        (
            "composition of half the length",
            "if side is None or side.packed.shape[-1] == states.shape[2]:",
            "if True:",
            T_CONVERTED + "test_generation_with_a_cache",
        ),
        (
            "causality of cross-attention",
            'is_causal = getattr(module, "is_causal", False)',
            "is_causal = True",
            T_CONVERTED + "test_without_composition_it_is_the_model",
        ),
    ),
    *_in(
        "modules",
        "modules/finding.py",
        (
            "what is not a tensor is taken for a weight",
            "weight if isinstance(weight, torch.Tensor) else None)",
            "weight)",
            "tests/modules/test_convert_attention.py::test_projections_without_a_weight_are_quantized_ones",
        ),
        (
            "attention beside the interface stays in silence",
            "if id(module) not in inside and _is_attention(type(module)):",
            "if False:",
            T_CONVERTED + "test_models_that_cannot_be_converted",
        ),
        (
            "self-attention with a cache that does not say that it is causal",
            "is_decoder = any(says) or both_ways or (not says and writes)",
            "is_decoder = any(says) or both_ways",
            T_CONVERTED + "test_attention_that_takes_a_cache_and_does_not_say_that_it_is_causal",
        ),
        (
            "modules of PyTorch that attend stay in silence",
            "|multi_head_attention_forward|",
            "|",
            T_CONVERTED + "test_models_that_cannot_be_converted",
        ),
    ),
    *_in(
        "modules",
        "modules/convert.py",
        (
            "models in shards are converted",
            "refuse_shards(one.module, ",
            "(one.module, ",
            "tests/test_shards.py::test_what_changes_a_model_refuses_shards",
        ),
        (
            "zero_init by its truth value",
            "    check_flags(zero_init=zero_init, allow_partial=allow_partial)\n",
            "",
            T_CONVERTED + "test_conversions_that_fail_leave_the_model_as_it_was",
        ),
        (
            "dtypes by their names are not known",
            "if isinstance(dtype, str) else dtype",
            "if False else dtype",
            T_CONVERTED + "test_a_dtype_by_its_name",
        ),
        (
            "devices that there are not have torch's error",
            "    _check_device(device)\n",
            "",
            T_CONVERTED + "test_conversions_that_fail_leave_the_model_as_it_was",
        ),
        (
            "parts with a configuration of their own",
            "        one.module.config._attn_implementation = implementation  #",
            "        pass  #",
            T_CONVERTED + "test_a_conversion_that_fails_leaves_every_part_as_it_was",
        ),
        (
            "a failed conversion leaves parts switched",
            "        config._attn_implementation = implementation  # and",
            "        pass  # and",
            T_CONVERTED + "test_a_conversion_that_fails_leaves_every_part_as_it_was",
        ),
        (
            "hooks that stay after a failure",
            "    for handle in handles:\n        handle.remove()\n    for one",
            "    for one",
            T_CONVERTED + "test_conversions_that_fail_leave_the_model_as_it_was",
        ),
    ),
]

T_DCVIT, T_BIG_VISION = "tests/vision/test_modeling_dcvit.py::", "tests/vision/test_big_vision.py::"
_VISION = [
    *_in(
        "vision",
        "vision/modeling_dcvit.py",
        (
            "positions are what memory held before a state dict was loaded",
            "        super()._load_from_state_dict(*args)\n        if not self.is_learned:",
            "        super()._load_from_state_dict(*args)\n        if False:",
            "tests/vision/test_modeling_dcvit.py::test_positions_after_a_state_dict",
        ),
        (
            "the damaged file of a vision model is not named",
            "with naming_damage(path, kwargs):",
            "with naming_damage(None, kwargs):",
            "tests/vision/test_modeling_dcvit.py::test_a_damaged_file_is_named",
        ),
        (
            "a causal vision Transformer",
            "    is_causal = False\n",
            "    is_causal = True\n",
            T_DCVIT + "test_attention_is_the_definition_without_causality",
        ),
        (
            "attention functions of the library for images",
            "takes_library_attention = False",
            "takes_library_attention = True",
            T_DCVIT + "test_attention_of_the_library_is_refused_without_composition",
            "tests/head_systems/test_head_images.py::test_attention_of_the_library_is_refused",
        ),
        (
            "rows and columns of positions",
            "parts = [part.expand(rows, columns, quarter) for part in (x.sin(), x.cos(), y.sin(), y.cos())]",
            "parts = [part.expand(rows, columns, quarter) for part in (y.sin(), y.cos(), x.sin(), x.cos())]",
            T_DCVIT + "test_positions_are_the_formulas",
        ),
        (
            "the class token has a patch's position",
            "known = self.position_embeddings[:, -self.grid[0] * self.grid[1] :]",
            "known = self.position_embeddings[:, : self.grid[0] * self.grid[1]]",
            T_DCVIT + "test_learned_positions_are_interpolated_as_transformers_does",
            T_DCVIT + "test_plain_setting_is_transformers_vit",
        ),
        (
            "interpolation by corners",
            'mode="bicubic", align_corners=False',
            'mode="bicubic", align_corners=True',
            T_DCVIT + "test_learned_positions_are_interpolated_as_transformers_does",
        ),
        (
            "a cut normal distribution of less than its std",
            "** -0.5 / 0.87962566103423978",
            "** -0.5",
            T_DCVIT + "test_initial_values_are_the_forks",
        ),
    ),
    *_in(
        "vision",
        "vision/configuration_dcvit.py",
        (
            "gates that start infinite or NaN",
            "if not 0 <= self.compose_gate_init < math.inf:",
            "if self.compose_gate_init < 0:",
            "tests/vision/test_configuration_dcvit.py::test_invalid_fields_are_named",
        ),
    ),
    *_in(
        "vision",
        "vision/big_vision.py",
        (
            "position of the class token",
            'torch.cat([nowhere, found["pos_embedding"]], dim=1)',
            'torch.cat([found["pos_embedding"], nowhere], dim=1)',
            T_BIG_VISION + "test_logits_are_the_forks",
        ),
        (
            "transposed static projections",
            'f"{layer}attention.compose.{stage}_static", "(g m) n"',
            'f"{layer}attention.compose.{stage}_static", "(g n) m"',
            T_BIG_VISION + "test_logits_are_the_forks",
        ),
        (
            "rank of the rows",
            "[3] // 2",
            "[3]",
            T_BIG_VISION + "test_configuration_comes_from_the_shapes",
        ),
        (
            "arrays left over",
            "if arrays or wanted - state.keys():",
            "if wanted - state.keys():",
            T_BIG_VISION + "test_what_is_no_checkpoint_of_it",
        ),
    ),
    *_in(
        "vision",
        "vision/image_processing_dcvit.py",
        (
            "broken images among the files",
            "            found.unreadable.append(path)\n        else:",
            "            found.files.append(path)\n        else:",
            "tests/vision/test_image_processing_dcvit.py::test_unreadable_images_stop_or_are_skipped",
        ),
    ),
]

T_DHA = "tests/dha/test_dha_"
DHA_EXACT, DHA_FUSION, DHA_SEARCH = T_DHA + "exact.py::", T_DHA + "fusion.py::", T_DHA + "search.py::"
DHA_FOLDING, DHA_CLI = T_DHA + "folding.py::", T_DHA + "cli.py::"
_DHA = [
    *_in(
        "dha",
        "dha/mixing.py",
        (
            "heads mixed in the order of groups",
            "return mixed.flatten(-3, -2)[..., self.places, :].to(heads.dtype)",
            "return mixed.flatten(-3, -2).to(heads.dtype)",
            DHA_EXACT + "test_mixers_that_are_not_trained_change_nothing",
            DHA_EXACT + "test_equal_rows_fold_exactly",
        ),
        (
            "transposed operators",
            '"...mjd,mijd->...mid"',
            '"...mjd,mjid->...mid"',
            DHA_EXACT + "test_equal_rows_fold_exactly",
        ),
        (
            "the keys' slot for the values of a fused projection",
            "parts[self.slot] = self.mix(parts[self.slot])",
            "parts[1 % self.slots] = self.mix(parts[1 % self.slots])",
            DHA_EXACT + "test_equal_rows_fold_exactly",
        ),
        (
            "fusion loss of ordered pairs",
            "return squares * 2 / (count * size * (size - 1) * head_dim)",
            "return squares / (count * size * (size - 1) * head_dim)",
            DHA_EXACT + "test_fusion_loss_at_the_start",
        ),
        (
            "operators closed to the mean over columns",
            "weight.lerp_(weight.mean(1, keepdim=True).expand_as(weight), share)",
            "weight.lerp_(weight.mean(2, keepdim=True).expand_as(weight), share)",
            DHA_FUSION + "test_a_closed_model_folds_exactly",
        ),
        (
            "frozen parameters stay frozen",
            "parameter.requires_grad_(was)",
            "pass",
            DHA_FUSION + "test_which_parameters_are_trained",
            DHA_SEARCH + "test_every_score_makes_a_plan",
        ),
    ),
    *_in(
        "dha",
        "dha/folding.py",
        (
            "shares of the first member for every member",
            "share = operator[number, place]",
            "share = operator[number, 0]",
            DHA_EXACT + "test_folding_is_the_sum_over_the_members",
        ),
        (
            "rounded after each member",
            "total = torch.zeros_like(heads[0], dtype=compute)",
            "total = torch.zeros_like(heads[0])",
            DHA_EXACT + "test_folding_rounds_once",
        ),
        (
            "heads of the plan's other kind",
            '_KIND = {"k": "key", "v": "value"}',
            '_KIND = {"k": "value", "v": "key"}',
            DHA_EXACT + "test_equal_rows_fold_exactly",
        ),
        (
            "query heads change places, their outputs do not",
            "state[name] = state[name].unflatten(1, (heads, -1))[:, order].flatten(1, 2)",
            "pass",
            DHA_EXACT + "test_a_tied_plan_becomes_a_plain_grouped_query_model",
        ),
        (
            "heads repeated in the order of the first ones",
            "repeated = row[:: heads // count]",
            "repeated = row[:count]",
            DHA_EXACT + "test_expansion_has_the_same_function",
        ),
        (
            "a damaged tensor is folded",
            "if not tensor.isfinite().all():",
            "if False:",
            DHA_FOLDING + "test_nothing_is_left_of_a_fold_that_fails",
        ),
        (
            "a fold continues with another plan",
            "repr((files, plan.to_json(), max_shard_size))",
            "repr((files, max_shard_size))",
            DHA_FOLDING + "test_an_interrupted_fold_of_something_else_starts_anew",
        ),
        (
            "a fold continues with another source",
            "repr((files, plan.to_json(), max_shard_size))",
            "repr((plan.to_json(), max_shard_size))",
            DHA_FOLDING + "test_an_interrupted_fold_of_something_else_starts_anew",
        ),
    ),
    *_in(
        "dha",
        "conversion/output.py",
        (
            "a tensor counts as written by half a line",
            '.split("\\n")[1:-1])',
            '.split("\\n")[1:])',
            DHA_FOLDING + "test_an_interrupted_fold_continues",
        ),
    ),
    *_in(
        "dha",
        "files.py",
        (
            "an interrupted fold leaves nothing",
            "stays = stays or made_from is not None",
            "stays = False",
            DHA_FOLDING + "test_an_interrupted_fold_continues",
        ),
    ),
    *_in(
        "dha",
        "dha/fusion.py",
        (
            "a full disk while a state is saved is a bug",
            "if (reason := why_not_written(error)) is None:",
            "if (reason := why_not_written(error)) is not False:",
            DHA_FUSION + "test_a_state_that_cannot_be_saved_leaves_the_one_before_it",
        ),
        (
            "half a state keeps the room that the next one needs",
            "            if accelerator.is_main_process:\n                shutil.rmtree(target, ignore_errors=True)\n",
            "",
            DHA_FUSION + "test_a_state_that_cannot_be_saved_leaves_the_one_before_it",
        ),
        (
            "a search leaves gradient checkpointing out",
            "layer.training = layer.gradient_checkpointing",
            "layer.training = False",
            DHA_FUSION + "test_a_search_keeps_less_with_gradient_checkpointing",
        ),
        (
            "a search with gradient checkpointing writes to a cache twice",
            "model(**batch, use_cache=False)",
            "model(**batch)",
            DHA_FUSION + "test_a_search_keeps_less_with_gradient_checkpointing",
        ),
        (
            "a search with gradient checkpointing has dropout",
            "layer.training = layer.gradient_checkpointing",
            "layer.train(layer.gradient_checkpointing)",
            DHA_FUSION + "test_a_search_keeps_less_with_gradient_checkpointing",
        ),
        (
            "a loader that shuffles draws its order with dropout",
            "            torch.set_rng_state(state)\n",
            "",
            DHA_FUSION + "test_a_loader_that_draws_its_order_continues_bit_for_bit",
        ),
        (
            "each pass over a loader has the order of the first",
            "_with_own_draws(source, seed + repeat)",
            "_with_own_draws(source, seed)",
            DHA_FUSION + "test_each_pass_over_a_loader_has_an_order_of_its_own",
        ),
        (
            "rows of several lengths are torch's to refuse",
            "if len(lengths) > 1:",
            "if False:",
            DHA_FUSION + "test_data_that_ends",
        ),
        (
            "a margin that does not decay",
            "decay**step * (1 - step / steps)",
            "1 - step / steps",
            DHA_FUSION + "test_margin",
        ),
        (
            "the multiplier follows the loss below its margin",
            "multiplier + lr * max(fusion_loss - tolerated, 0.0)",
            "multiplier + lr * (fusion_loss - tolerated)",
            DHA_FUSION + "test_the_multiplier_never_falls_and_rests_below_the_margin",
        ),
        (
            "operators decay",
            '"lr": mixer_lr, "weight_decay": 0.0}',
            '"lr": mixer_lr, "weight_decay": 0.1}',
            DHA_FUSION + "test_operators_do_not_decay",
        ),
        (
            "the warm-up of the operators is the model's",
            "for group in optimizer.param_groups[1:]:",
            "for group in optimizer.param_groups:",
            DHA_FUSION + "test_operators_do_not_decay",
        ),
        (
            "a run continues with its first batches",
            "rank + len(history) * accumulation * world",
            "rank",
            DHA_FUSION + "test_an_interrupted_run_continues_bit_for_bit",
        ),
        (
            "a continued run starts with no penalty",
            'penalty.multiplier = history[-1]["lambda"]',
            "pass",
            DHA_FUSION + "test_an_interrupted_run_continues_bit_for_bit",
        ),
        (
            "padding is learnt",
            '.masked_fill(given["attention_mask"] == 0, -100)',
            "",
            DHA_FUSION + "test_any_data",
        ),
        (
            "closed a step early",
            "(closing := step - steps + closing_steps + 1) > 0",
            "(closing := step - steps + closing_steps) > 0",
            DHA_FUSION + "test_a_closed_model_folds_exactly",
        ),
        (
            "what is not closed is folded in silence",
            "if (gap := self.gap) > CLOSED:",
            "if (gap := self.gap) > 1:",
            DHA_FUSION + "test_what_is_not_closed_is_not_folded_in_silence",
        ),
    ),
    *_in(
        "dha",
        "dha/search.py",
        (
            "a uniform plan of a folder is of no model",
            "is_source = isinstance(config, PreTrainedModel | str | os.PathLike)",
            "is_source = isinstance(config, PreTrainedModel)",
            DHA_SEARCH + "test_a_uniform_plan_of_a_folder_is_that_of_its_model",
        ),
        (
            "fewer heads than asked for, in silence",
            "if kept < asked:",
            "if False:",
            DHA_SEARCH + "test_a_ratio_that_no_count_comes_near_is_said_to_keep_fewer",
        ),
        (
            "biases left out of distances",
            "rows = weight if bias is None else",
            "rows = weight if True else",
            DHA_SEARCH + "test_weight_distances",
        ),
        (
            "higher scores accepted, as printed",
            "if delta > 0 and rng.random()",
            "if delta < 0 and rng.random()",
            DHA_SEARCH + "test_groups_of_eight_heads_are_the_best",
        ),
        (
            "the last grouping, not the best",
            "return canonical(best)",
            "return canonical(groups)",
            DHA_SEARCH + "test_the_best_grouping_seen_is_kept",
        ),
        (
            "the change of a swap without the pair itself",
            "- 2 * distances[i][j] - sums[i][one]",
            "- sums[i][one]",
            DHA_SEARCH + "test_groups_of_eight_heads_are_the_best",
        ),
        (
            "root of the number of groups",
            '"root": math.sqrt(size)',
            '"root": size**0.25',
            DHA_SEARCH + "test_costs_of_a_part",
        ),
        (
            "a budget passed by one",
            "if (now := used + count) <= budget:",
            "if (now := used + count) <= budget + 1:",
            DHA_SEARCH + "test_budget_is_the_best_of_all_choices",
        ),
        (
            "ties in a budget fall anyhow",
            "extra = cost / scale + _UNEQUAL",
            "extra = cost / scale + 0 * _UNEQUAL",
            DHA_SEARCH + "test_without_a_signal_counts_are_equal",
        ),
        (
            "groups across blocks",
            "if blocks > 1:",
            "if False:",
            DHA_SEARCH + "test_groups_stay_inside_blocks",
        ),
        (
            "trained searches by the weights as they are",
            "weight, bias = mixed_weights(weight, bias, operators[layer, kind])",
            "pass",
            DHA_SEARCH + "test_function_is_the_distance_of_mixed_weights",
        ),
        (
            "displacements of keys and values that share groups added up",
            'part_cost(group_score(of_kind, groups), size, "displacement") for of_kind in tables',
            'part_cost(total, size, "displacement") for of_kind in tables',
            DHA_SEARCH + "test_displacements_of_a_plan_are_of_each_part",
        ),
    ),
    *_in(
        "dha",
        "dha/plan.py",
        (
            "a plan of a ratio of NumPy's cannot be saved",
            'object.__setattr__(self, "kv_ratio", float(self.kv_ratio))',
            'object.__setattr__(self, "kv_ratio", self.kv_ratio)',
            DHA_SEARCH + "test_ratio_and_seed_may_be_numbers_of_numpy",
        ),
        (
            "maps of a grouped-query source by query head",
            "for head in self.source.head_map(layer, kind)])",
            "for head in range(self.source.heads(layer, kind))])",
            DHA_SEARCH + "test_uniform_plans",
        ),
        (
            "plans for any source",
            'if found != made_for and (name, made_for) != ("fingerprint", ""):',
            'if found != made_for and name != "fingerprint":',
            DHA_SEARCH + "test_a_plan_for_another_source_is_refused",
        ),
    ),
    *_in(
        "dha",
        "dha/sources.py",
        (
            "partial RoPE of a Llama that does not read it",
            'fields["rope_parameters"].pop("partial_rotary_factor", None)',
            "pass",
            "tests/dha/test_dha_folding.py::test_what_a_llama_has_not_stays_in_a_model_of_this_package",
        ),
        (
            "proportional RoPE of a Llama without its factor",
            'if fields["rope_parameters"].get("rope_type") != "proportional":',
            "if True:",
            DHA_FOLDING + "test_a_source_is_read_as_the_library_runs_it",
            DHA_FOLDING + "test_rope_that_a_llama_has_too",
        ),
        (
            "windows that no layer has are compared",
            '{"sliding_window": _window_of_layers(config)}',
            "{}",
            DHA_FOLDING + "test_a_window_that_no_layer_has_keeps_nothing_from_being_a_librarys_model",
        ),
        (
            "windows that no layer has are handed on",
            "window = _window_of_layers(config)",
            "window = config.sliding_window",
            DHA_FOLDING + "test_a_window_that_no_layer_has_keeps_nothing_from_being_a_librarys_model",
        ),
        (
            "norms of heads with another epsilon",
            'fields["qk_norm_eps"] = config.rms_norm_eps',
            "pass",
            "tests/dha/test_dha_folding.py::test_what_a_llama_has_not_stays_in_a_model_of_this_package",
        ),
        (
            "rows of GPT-NeoX by kind, not by head",
            "rows = tensor.unflatten(0, (config.num_attention_heads, 3, -1))",
            "rows = tensor.unflatten(0, (3, config.num_attention_heads, -1)).transpose(0, 1)",
            DHA_EXACT + "test_equal_rows_fold_exactly",
        ),
        (
            "Qwen2's biases forgotten",
            'return super().fields(config) | {"attention_bias": True}',
            "return super().fields(config)",
            DHA_EXACT + "test_equal_rows_fold_exactly",
        ),
        (
            "windows of the source forgotten",
            '"layer_types": list(kinds), "sliding_window": window if "sliding_attention" in kinds else None}',
            '"layer_types": ["full_attention"] * len(kinds), "sliding_window": None}',
            DHA_EXACT + "test_equal_rows_fold_exactly",
        ),
        (
            "the file that makes a configuration unreadable is not named",
            "damaged_file(folder, error) or f",
            "f",
            DHA_FOLDING + "test_a_configuration_that_no_model_has_is_refused",
        ),
        (
            "converted models are taken",
            "if is_converted(config):",
            "if False:",
            DHA_FOLDING + "test_converted_models_are_refused",
        ),
        (
            "models in shards are taken",
            '    refuse_shards(model, "load it again, whole; search and fuse distribute it themselves")\n',
            "",
            DHA_FOLDING + "test_a_model_in_shards_is_to_be_loaded_again",
        ),
    ),
    *_in(
        "dha",
        "__init__.py",
        (
            "names that no module has are looked for as modules",
            " or not name.isidentifier() or find_spec",
            " or find_spec",
            "tests/test_architecture.py::test_other_parts_are_there_by_name",
        ),
    ),
    *_in(
        "dha",
        "dha/cli.py",
        (
            "a plan is there before its record",
            "in ((given, record), (made, output)):",
            "in ((made, output), (given, record)):",
            DHA_CLI + "test_a_search_that_is_killed_while_it_writes",
        ),
        (
            "a former plan passes for that of another's record",
            "found = now | ({} if plan is None else _content_of(plan))",
            "found = now | ({} if plan is None else {name: saved.get(name) for name in _content_of(plan)})",
            DHA_CLI + "test_a_search_that_is_killed_while_it_writes",
        ),
        (
            "a plan that is replaced becomes readable to all",
            "                        shutil.copymode(place, file)",
            "                        pass",
            DHA_CLI + "test_a_plan_that_cannot_be_replaced_stays",
        ),
        (
            "a state stays behind its result",
            "if _is_main() and state.is_dir():",
            "if False:",
            DHA_CLI + "test_the_state_of_a_stage_that_was_killed_behind_its_result",
        ),
        (
            "a result removes the state of a run that is to replace it",
            "if not _holds_state(state) or _read_given(state / _GIVEN) == now:",
            "if True:",
            DHA_CLI + "test_the_state_of_a_stage_that_was_killed_behind_its_result",
        ),
        (
            "a slash behind a folder is another argument",
            "os.path.normpath(given[name])",
            "given[name]",
            DHA_CLI + "test_from_a_folder_to_a_folded_one",
        ),
        (
            "every configuration has a number of key and value heads",
            'getattr(plain.config, "num_key_value_heads", plain.config.num_attention_heads)',
            "plain.config.num_key_value_heads",
            DHA_CLI + "test_a_folded_neox_is_expanded",
        ),
        (
            "an edited plan is the same plan",
            'for file in (*files, *([Path(options.plan)] if getattr(options, "plan", None) else [])):',
            "for file in files:",
            DHA_CLI + "test_a_result_of_an_edited_plan_is_another",
        ),
        (
            "a row of 512 tokens of a model that takes fewer",
            "options.length = min(_LENGTH, context)",
            "options.length = _LENGTH",
            DHA_CLI + "test_rows_are_no_longer_than_the_models_context",
        ),
        (
            "rows beyond the context when asked for",
            "if has_rows and not 2 <= options.length <= context:",
            "if has_rows and not 2 <= options.length:",
            DHA_CLI + "test_rows_are_no_longer_than_the_models_context",
            DHA_CLI + "test_wrong_input_is_one_line",
        ),
        (
            "the length of rows that nothing reads is judged",
            "if has_rows and not 2 <= options.length <= context:",
            "if not 2 <= options.length <= context:",
            DHA_CLI + "test_rows_are_no_longer_than_the_models_context",
        ),
        (
            "a plan's file above which a file stands says that it exists",
            "{why_not_written(error)}",
            "{error.strerror}",
            DHA_CLI + "test_wrong_input_is_one_line",
        ),
        (
            "prompts with completions count as conversations",
            'if "messages" in texts.column_names:',
            'if "text" not in texts.column_names:',
            DHA_CLI + "test_wrong_input_is_one_line",
        ),
        (
            "folding that lowered the loss is said to have raised it",
            "folding changed the loss on",
            "folding raised the loss on",
            DHA_CLI + "test_a_gap_is_refused_with_its_price",
        ),
        (
            "a run continues with other rows",
            "if _holds_state(folder) and (names := _differing(_read_given(folder / _GIVEN), now)):",
            'if _holds_state(folder) and (names := ""):',
            DHA_CLI + "test_an_interrupted_run_is_not_continued_with_other_arguments",
        ),
    ),
    *_in(
        "dha",
        "dha/reporting.py",
        (
            "a local layer's cache holds everything",
            'min(context, windows) if kind == "sliding_attention" else context',
            "context",
            DHA_FOLDING + "test_report_counts_what_a_cache_holds",
        ),
    ),
]

MUTATIONS = [
    *_COMPOSE,
    *_CACHE,
    *_CONFIGURATION,
    *_HUB,
    *_CONVERSION,
    *_KERNELS,
    *_MODELING,
    *_GENERATION,
    *_LAYERS,
    *_ATTENTION,
    *_HEADS,
    *_MASKS,
    *_OVERFLOW,
    *_SELFCHECK,
    *_PLAIN,
    *_CHUNKED,
    *_MODULES,
    *_VISION,
    *_ANALYSIS,
    *_DHA,
]
