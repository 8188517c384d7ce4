"""The server command answers chat completions over HTTP; continuous batching fails clearly."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
from helpers import REPOSITORY, tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_serve_available

from dcformer import DCFormerForCausalLM
from dcformer import serve as serve_module

PAGE = (REPOSITORY / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
needs_server = pytest.mark.skipif(not is_serve_available(), reason="the extra [serve] is not installed")


def block(start: str) -> str:
    """The bash block of the page that has a line with this start."""
    return next(text for text in BLOCKS if re.search(f"^{re.escape(start)}", text, re.MULTILINE))


def request_of_the_page() -> dict:
    words = shlex.split(block("curl ").replace("\\\n", " "))
    return json.loads(words[words.index("-d") + 1])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Folder of a chat model, and address of a server started with the page's commands."""
    work = tmp_path_factory.mktemp("serve")
    for name in ("checkpoints", "examples"):
        os.symlink(REPOSITORY / name, work / name)
    (work / "runs").mkdir()
    prepare, command = block("dcformer-serve ").strip().splitlines()
    subprocess.run(prepare, shell=True, check=True, cwd=work)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = shlex.split(command)
    words[words.index("--port") + 1] = str(port)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    log = work / "server.log"
    with open(log, "wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "dcformer.serve", *words[1:]], cwd=work, env=environment, stdout=sink, stderr=sink
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")
                time.sleep(0.2)
        yield work / "runs" / "chat", address
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def post(address: str, body: dict):
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=120)


def answer_of_generate(folder, body: dict) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    batch = tokenizer.apply_chat_template(
        body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ids = model.generate(**batch, max_new_tokens=body["max_tokens"], do_sample=False)
    return tokenizer.decode(ids[0, batch["input_ids"].shape[1] :], skip_special_tokens=True).strip()


@needs_server
@pytest.mark.slow
def test_chat_completion_equals_generate(server):
    folder, address = server
    body = request_of_the_page()
    body.pop("stream", None)
    with post(address, body) as response:
        answer = json.load(response)
    assert answer["choices"][0]["message"]["content"].strip() == answer_of_generate(folder, body) != ""
    assert answer["usage"]["completion_tokens"] <= body["max_tokens"]


@needs_server
@pytest.mark.slow
def test_stream_equals_generate(server):
    folder, address = server
    body = request_of_the_page() | {"stream": True}
    with post(address, body) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = [line.decode().strip() for line in response]
    events = [json.loads(line[len("data: ") :]) for line in lines if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") for event in events]
    pieces = [piece for piece in pieces if piece]
    assert len(pieces) > 1
    assert "".join(pieces).strip() == answer_of_generate(folder, body)


@pytest.mark.parametrize("attn_implementation", ["dcformer_chunked", "eager"])
def test_continuous_batching_is_refused_with_the_reason(attn_implementation):
    model = DCFormerForCausalLM._from_config(tiny_config(), attn_implementation=attn_implementation)
    for call in (model.init_continuous_batching, lambda: model.generate_batch([[1, 2, 3]])):
        with pytest.raises(NotImplementedError, match=r"composition weights behind them.*padded batch"):
            call()
    assert model.config._attn_implementation == attn_implementation


@needs_server
def test_server_refuses_continuous_batching_before_it_loads(capsys):
    assert serve_module.main(["no-such-model", "--continuous-batching"]) == 1
    assert "has no --continuous-batching" in capsys.readouterr().err


@needs_server
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "dcformer-serve absent: "),
        (["without_tokenizer"], "Can't instantiate a processor"),
        (["bundled", "--attn-implementation", "sdpa"], "attn_implementation='sdpa' cannot compose attention heads"),
        (["bundled", "--attn-implementation", "dcformer_chunked"], "Unsupported attention implementation"),
        (["bundled", "--dtype", "float12"], "Unsupported dtype: 'float12'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_models_that_cannot_be_served(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    os.symlink(REPOSITORY / "checkpoints" / "dcformer-synthetic", tmp_path / "bundled")
    DCFormerForCausalLM(tiny_config()).save_pretrained(tmp_path / "without_tokenizer")
    monkeypatch.setattr("uvicorn.Server.run", lambda _: pytest.fail("the server starts"))
    assert serve_module.main(arguments) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert message in line


def test_missing_extra(monkeypatch, capsys):
    pytest.importorskip("typer")
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    assert serve_module.main([]) == 1
    assert "pip install 'dcformer[serve]'" in capsys.readouterr().err


def test_unknown_option_is_wrong_usage():
    if not is_serve_available():
        pytest.skip("the extra [serve] is not installed")
    with pytest.raises(SystemExit) as exit_:
        serve_module.main(["--no-such-option"])
    assert exit_.value.code == 2
