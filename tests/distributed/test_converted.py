"""A model that `convert_attention` has converted, trained and saved on two processes."""

import json

import pytest
import torch
from helpers import REPOSITORY
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification

from dcformer.modules import from_pretrained_converted

HERE = REPOSITORY / "tests" / "distributed"
WORKER = HERE / "converted_worker.py"
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
FSDP2 = ["-m", "accelerate.commands.launch", "--config_file", REPOSITORY / "examples" / "accelerate" / "fsdp2.yaml",
         "--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0",
         "--fsdp_transformer_layer_cls_to_wrap", "ViTLayer", HERE / "on_cpu.py"]  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("launch", [TWO, FSDP2], ids=["copies", "fsdp2"])
def test_training_is_that_of_one_process(start, tmp_path, launch):
    start(WORKER, tmp_path / "one.json", "--batch", "4")
    start(*launch, WORKER, tmp_path / "two.json", "--batch", "2")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2)
    assert len(one["history"]) == len(two["history"]) == 6
    for ours, theirs in zip(two["history"], one["history"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert one["moved"] == two["moved"]
    assert any(".compose." in name for name in one["moved"])
    assert all(".compose." in name or name.startswith("classifier.") for name in one["moved"])
    # under FSDP2 a process holds its half of the parameters, up to rows that do not divide
    assert two["share"] == (1 if launch is TWO else pytest.approx(0.5, abs=0.03))

    first, second = (
        from_pretrained_converted(tmp_path / name, AutoModelForImageClassification).eval() for name in ("one", "two")
    )
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(second(images).logits, first(images).logits, rtol=0, atol=1e-5)  # as the losses
    assert "import ViTForImageClassification" in (tmp_path / "two" / "README.md").read_text()
    whole, composition = second.state_dict(), load_file(tmp_path / "two" / "compose.safetensors")
    assert composition.keys() == {name for name in whole if ".compose." in name}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in composition.items())
