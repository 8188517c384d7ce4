"""Transformers' common tests of models, on all of the package's. `run.py` beside this file runs them."""

import unittest

from tests import test_fsdp_mixin, test_tensor_parallel_mixin
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_fsdp_mixin import FSDPTesterMixin
from tests.test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor, random_attention_mask
from tests.test_tensor_parallel_mixin import TensorParallelTesterMixin
from tests.test_training_mixin import TrainingTesterMixin
from transformers.models.auto import modeling_auto

import dcformer

# They choose labels and losses by looking a class's name up in these tables, which have the library's own models only.
HEADS = {
    "Model": "MODEL_MAPPING_NAMES",
    "ForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "ForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "ForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}
for family in ("DCFormer", "DCPythia", "DHA"):
    for head, table in HEADS.items():
        getattr(modeling_auto, table)[family.lower()] = family + head

SYSTEM_HEADS = ("Model", "ForCausalLM", "ForSequenceClassification")
for head in SYSTEM_HEADS:
    getattr(modeling_auto, HEADS[head])["dcformer_heads"] = "HeadSystems" + head

VISION_HEADS = {
    "Model": "MODEL_MAPPING_NAMES",
    "ForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
for head, table in VISION_HEADS.items():
    getattr(modeling_auto, table)["dcvit"] = "DCViT" + head

# Their tests of several processes run for a list of model types unless it is None.
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None


class Tester:
    """What their tests ask about a model: its classes, a small configuration, and inputs for it.

    Args:
        family: "DCFormer", "DCPythia", "DHA" or "HeadSystems".
        fields: of the configuration, beside the sizes.
    """

    batch_size, seq_length, num_labels, is_training = 13, 7, 3, True
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 64, 2, 4, 99

    def __init__(self, family: str, fields: dict):
        self.fields = fields
        self.config_class = getattr(dcformer, f"{family}Config")
        self.base_model_class = getattr(dcformer, f"{family}Model")
        self.causal_lm_class = getattr(dcformer, f"{family}ForCausalLM")

    def get_config(self):
        return self.config_class(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=64,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            compose_groups=2,
            max_position_embeddings=128,
            sliding_window=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **self.fields,
        )

    def prepare_config_and_inputs_for_common(self):
        shape = [self.batch_size, self.seq_length]
        return self.get_config(), {
            "input_ids": ids_tensor(shape, self.vocab_size),
            "attention_mask": random_attention_mask(shape),
        }


class Contract(ModelTesterMixin, GenerationTesterMixin):
    """What all families are tested for."""

    family = ""
    fields: dict = {}  # noqa: RUF012 - as below
    pipeline_model_mapping = {}  # noqa: RUF012 - theirs is a plain class attribute, too
    test_can_init_all_missing_weights_before_2023 = True  # the copyright line that it reads a year from is theirs

    def setUp(self):
        self.model_tester = Tester(self.family, self.fields)
        sizes = {"hidden_size": 64, "num_attention_heads": 4}
        self.config_tester = ConfigTester(self, config_class=self.model_tester.config_class, **sizes)

    @property
    def all_model_classes(self):
        return tuple(getattr(dcformer, self.family + head) for head in HEADS)

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_generation_tester_mixin_inheritance(self):
        self.skipTest("the source distribution has no tests of generation")


class DCFormerTest(Contract, TrainingTesterMixin, TensorParallelTesterMixin, FSDPTesterMixin, unittest.TestCase):
    family = "DCFormer"


class DCPythiaTest(Contract, unittest.TestCase):
    """LayerNorm, biases, a plain MLP, a parallel residual: in one process, as the rest is the same code."""

    family = "DCPythia"


class SystemContract(Contract):
    """A head system, composed: in one process, as what is split over several is DCFormer's."""

    family = "HeadSystems"
    system: tuple[str, dict] = ("plain", {})

    def setUp(self):
        super().setUp()
        name, options = self.system
        fields = {"head_system": name, "head_system_options": options}
        if name == "talking_heads":
            fields |= {"compose_static": True, "compose_query": False, "compose_key": False}
        self.model_tester = Tester(self.family, fields)

    @property
    def all_model_classes(self):
        return tuple(getattr(dcformer, self.family + head) for head in SYSTEM_HEADS)


class TalkingHeadsTest(SystemContract, unittest.TestCase):
    system = ("talking_heads", {})


class CollaborativeTest(SystemContract, unittest.TestCase):
    system = ("collaborative", {"shared_key_query_dim": 32, "content_bias": True})


class OverlappedTest(SystemContract, unittest.TestCase):
    system = ("overlapped", {"overlap": "depth1"})


class MixtureOfHeadsTest(SystemContract, unittest.TestCase):
    system = ("mixture_of_heads", {"num_shared_heads": 1, "num_routed_heads_per_tok": 2})


class OutputGateTest(SystemContract, unittest.TestCase):
    system = ("output_gate", {"output_gate": "elementwise", "output_gate_bias": True})


class HeadPruningTest(SystemContract, unittest.TestCase):
    system = ("head_pruning", {})


class DHATest(Contract, unittest.TestCase):
    """Other numbers of key than of value heads in every layer, and Transformers' own attention functions."""

    family = "DHA"
    fields = {  # noqa: RUF012 - as above
        "key_head_map": [[0, 1, 1, 0], [0, 0, 0, 0]],
        "value_head_map": [[0, 0, 0, 0], [3, 0, 2, 1]],
    }


PLAIN = dict.fromkeys(("compose_pre", "compose_post", "compose_query", "compose_key"), False)


class MHEAddTest(Contract, unittest.TestCase):
    family, fields = "DCFormer", {"head_embeddings": "add"}


class MHEMulTest(Contract, unittest.TestCase):
    family, fields = "DCFormer", {"head_embeddings": "mul"}


class PlainMHEAddTest(Contract, unittest.TestCase):
    family, fields = "DCFormer", {"head_embeddings": "add", **PLAIN}


class PlainMHEMulTest(Contract, unittest.TestCase):
    family, fields = "DCFormer", {"head_embeddings": "mul", **PLAIN}


class VisionTester:
    """As `Tester`, for images."""

    batch_size, seq_length, num_labels, is_training = 13, 16, 3, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def get_config(self):
        return dcformer.DCViTConfig(
            image_size=16,
            patch_size=4,
            hidden_size=self.hidden_size,
            intermediate_size=37,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_labels=self.num_labels,
            compose_groups=2,
        )

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {"pixel_values": floats_tensor([self.batch_size, 3, 16, 16])}


class DCViTTest(ModelTesterMixin, unittest.TestCase):
    """The vision Transformer: no text, no cache, no generation."""

    pipeline_model_mapping = {}  # noqa: RUF012 - theirs is a plain class attribute, too
    test_can_init_all_missing_weights_before_2023 = True  # as in `Contract`
    test_resize_embeddings = False
    has_attentions = True

    def setUp(self):
        self.model_tester = VisionTester()
        sizes = {"hidden_size": 32, "num_attention_heads": 4}
        self.config_tester = ConfigTester(self, config_class=dcformer.DCViTConfig, has_text_modality=False, **sizes)

    @property
    def all_model_classes(self):
        return tuple(getattr(dcformer, "DCViT" + head) for head in VISION_HEADS)

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_model_get_set_embeddings(self):
        """Theirs wants an `nn.Embedding`; as in their own tests of vision models, what embeds patches is any module."""
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            self.assertIs(model.get_input_embeddings(), model.base_model.embeddings.patch_embeddings)
            self.assertIsNone(model.get_output_embeddings())
