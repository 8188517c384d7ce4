"""The server command answers chat completions over HTTP and refuses bad requests and continuous batching clearly."""

import ast
import asyncio
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY, randomize, tiny_config
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils.import_utils import is_serve_available

from dcformer import DCFormerForCausalLM, DCFormerForSequenceClassification
from dcformer.modules import convert_attention
from dcformer.serving import main, requests
from dcformer.serving.server import _own_application

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
    environment |= {"HF_HOME": str(work / "absent"), "HF_HUB_CACHE": str(work / "absent" / "hub")}
    log = work / "server.log"
    with open(log, "wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "dcformer.serving", *words[1:]], cwd=work, env=environment, stdout=sink, stderr=sink
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


def post(address: str, body: dict, path: str = "/v1/chat/completions"):
    request = urllib.request.Request(
        f"{address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
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


def test_answer_of_the_page(tmp_path):
    """The page says what the bundled checkpoint answers to its request."""
    folder = shutil.copytree(REPOSITORY / "checkpoints" / "dcformer-synthetic", tmp_path / "chat")
    shutil.copy(REPOSITORY / "examples" / "data" / "chat_template.jinja", folder)
    assert f'of the same messages: "{answer_of_generate(folder, request_of_the_page())}"' in PAGE


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


@needs_server
@pytest.mark.slow
def test_bad_requests_are_refused_and_the_server_stays(server):
    _, address = server
    good = request_of_the_page() | {"stream": False}
    text = {"model": good["model"], "prompt": "Peter owns the desk", "max_tokens": 2}
    chat_path, text_path, responses_path = requests.CHAT, requests.TEXT, requests.RESPONSES
    cases = [
        (chat_path, good | {"messages": []}, "messages", "messages=[] must be"),
        (chat_path, good | {"messages": [{"role": "user", "content": None}]}, "messages", "[0].content=None must be"),
        (chat_path, good | {"max_tokens": -1}, "max_tokens", "max_tokens=-1 must be a whole number of at least 1"),
        (chat_path, good | {"max_tokens": -1, "stream": True}, "max_tokens", "max_tokens=-1"),
        (chat_path, good | {"n": 3}, "n", "n=3 is not supported"),
        (chat_path, good | {"logprobs": True, "top_logprobs": 2}, "logprobs", "logprobs=True is not supported"),
        (text_path, text | {"logprobs": 2}, "logprobs", "logprobs=2 is not supported"),
        (text_path, text | {"prompt": ""}, "prompt", "prompt='' must be"),
        (responses_path, {"model": good["model"], "input": "a", "max_output_tokens": 0}, "max_output_tokens", "=0"),
        (chat_path, good | {"logit_bias": {"a": 1.0}}, None, "invalid literal for int()"),  # only the server looks
    ]
    # a few of FAULTS: without the checks each is an internal error of the server
    cases += [(chat_path, good | {name: 5}, name, f"{name}=5 must be") for name in ("stop", "tools", "logit_bias")]
    cases += [
        (chat_path, good | {"generation_config": "[]"}, "generation_config", "generation_config='[]' must be"),
        (text_path, text | {"suffix": 5}, "suffix", "suffix=5 must be a text"),
        (responses_path, {"model": good["model"], "input": ["a"]}, "input", "input has a part 'a'"),
    ]
    # what the tokenizer and the model cannot take, in streams too
    answer = {"model": good["model"], "input": "a"}
    for more in ({"stream": False}, {"stream": True}):
        cases += [
            (text_path, text | more | {"prompt": " "}, "prompt", "prompt=' ' has no tokens"),
            (text_path, text | more | {"prompt": "a \ud800"}, "prompt", "prompt holds '\\ud800'"),
            (chat_path, good | more | {"messages": [{"role": "user", "content": "\udfff"}]}, "messages", "'\\udfff'"),
            (text_path, text | more | {"max_tokens": 10**9}, "max_tokens", "=1000000000, expected at most 512"),
            (chat_path, good | more | {"max_tokens": 513}, "max_tokens", "max_tokens=513, expected at most 512"),
            (responses_path, answer | more | {"max_output_tokens": 513}, "max_output_tokens", "=513, expected at most"),
        ]
    for path, body, field, message in cases:
        with pytest.raises(urllib.error.HTTPError) as raised:
            post(address, body, path)
        assert raised.value.code == 400, body
        assert raised.value.headers["x-request-id"]
        error = json.load(raised.value)["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", field)
        assert message in error["message"]
    nothing = {"stop": [""], "logit_bias": {}, "chat_template_kwargs": None}  # the server fails for each
    for path, body in (
        (chat_path, good | {"n": 1, "logprobs": False, "user": "me"}),
        (chat_path, good | nothing | {"messages": [good["messages"][0] | {"tool_calls": None}]}),
        (text_path, text),
        (text_path, text | {"stop": ""}),
        (text_path, text | {"prompt": "a \U00010000"}),  # a whole pair of surrogates, as JSON writes it
    ):
        with post(address, body, path) as response:
            assert len(json.load(response)["choices"]) == 1


@needs_server
@pytest.mark.slow
def test_models_without_a_cache_of_the_hub(server):
    folder, address = server
    with urllib.request.urlopen(f"{address}/v1/models", timeout=60) as response:
        (model,) = json.load(response)["data"]
    assert (model["id"], model["object"]) == (request_of_the_page()["model"], "model")
    assert not (folder.parent.parent / "absent").exists()


@needs_server
@pytest.mark.slow
def test_the_client_of_openai(server):
    openai = pytest.importorskip("openai")
    folder, address = server
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    body = request_of_the_page() | {"stream": False}
    answer = client.chat.completions.create(**body)
    assert answer.choices[0].message.content.strip() == answer_of_generate(folder, body)
    assert [model.id for model in client.models.list()] == [body["model"]]
    with pytest.raises(openai.BadRequestError, match="n=3 is not supported"):
        client.chat.completions.create(**body | {"n": 3})


MESSAGES = [{"role": "user", "content": "a"}]
CALL = {"function": {"name": "f", "arguments": "{}"}}
FAULTS = [
    (requests.CHAT, {"messages": MESSAGES} | fields, field)
    for fields, field in [
        ({}, None),
        ({"max_tokens": 1, "temperature": 0, "top_p": 1, "seed": -1, "stop": "."}, None),
        ({"logprobs": None, "n": None, "response_format": {"type": "text"}, "tools": []}, None),
        ({"messages": "a"}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]}, None),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a\udfff"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\U0001f600"}]}, None),
        ({"chat_template_kwargs": {"\ud800": 1}}, "chat_template_kwargs"),
        ({"stop": ["\ud800"]}, "stop"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"seed": "a"}, "seed"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"model": 3}, "model"),
        ({"stream": "no"}, "stream"),
        ({"stream": False, "model": "a"}, None),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias"),
        ({"logit_bias": {"5": "3"}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"verbosity": "low"}, "verbosity"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"tools": 5}, "tools"),
        ({"tools": ["a"]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, None),
        ({"logit_bias": 5}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"5": 1.0}}, None),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"generation_config": "{"}, "generation_config"),
        ({"generation_config": "[]"}, "generation_config"),
        ({"generation_config": "5"}, "generation_config"),
        ({"generation_config": {}}, "generation_config"),
        ({"generation_config": '{"num_return_sequences": 3, "do_sample": true}'}, "generation_config"),
        ({"generation_config": '{"return_dict_in_generate": true}'}, "generation_config"),
        ({"generation_config": '{"num_return_sequences": 1, "max_new_tokens": 2}'}, None),
    ]
]
FAULTS += [
    (requests.CHAT, {"messages": [{"role": "assistant", "tool_calls": calls}]}, field)
    for calls, field in [
        (5, "messages"),
        ([5], "messages"),
        ([{}], "messages"),
        ([{"function": 5}], "messages"),
        ([{"function": {"name": "f"}}], "messages"),
        (None, "messages"),
        ([CALL], None),
    ]
]
FAULTS += [
    (requests.TEXT, {"prompt": "a"}, None),
    (requests.TEXT, {}, "prompt"),
    (requests.TEXT, {"prompt": ["a"]}, "prompt"),
    (requests.TEXT, {"prompt": "a\ud800"}, "prompt"),
    (requests.TEXT, {"prompt": "a", "echo": True}, "echo"),
    (requests.TEXT, {"prompt": "a", "logprobs": 0}, "logprobs"),
    (requests.RESPONSES, {"input": "a", "top_logprobs": 1}, "top_logprobs"),
    (requests.TEXT, {"prompt": "a", "stop": 5}, "stop"),
    (requests.TEXT, {"prompt": "a", "suffix": 5}, "suffix"),
    (requests.TEXT, {"prompt": "a", "logit_bias": {"5": 1.0}}, "logit_bias"),
    (requests.TEXT, {"prompt": "a", "logit_bias": {}, "suffix": "b"}, None),
    (requests.RESPONSES, {"input": "a", "instructions": 5}, "instructions"),
    (requests.RESPONSES, {"input": "a", "tools": 5}, "tools"),
    (requests.RESPONSES, {"input": "a", "conversation": "b"}, "conversation"),
    (requests.RESPONSES, {"input": "a", "instructions": "b", "tools": [{"type": "function", "name": "f"}]}, None),
    ("/v1/audio/transcriptions", {"n": 3}, None),
    (requests.CHAT, [1], None),  # the server says that it is not an object
]
PART, IMAGE = {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "a"}
MESSAGE = {"role": "user", "content": "a"}
CALLED = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
FAULTS += [
    (requests.RESPONSES, {"input": given}, field)
    for given, field in [
        ([], "input"),
        (5, "input"),
        ([5], "input"),
        (["a"], "input"),
        ([{"type": "input_text"}], "input"),
        ([PART, IMAGE], "input"),
        ([CALLED], "input"),  # without a message before it the server takes it for a part, and drops it
        ([{"role": 5, "content": "a"}], "input"),
        ([{"role": "user", "content": 5}], "input"),
        ([{"role": "user", "content": ["a"]}], "input"),
        ([{"role": "user", "content": [IMAGE]}], "input"),
        ([MESSAGE, 5], "input"),
        ([MESSAGE, {"type": "unknown"}], "input"),
        ([MESSAGE, {"type": "function_call"}], "input"),
        ([MESSAGE, CALLED, {"type": "function_call_output", "call_id": "1", "output": 5}], "input"),
        ([MESSAGE, {"type": "reasoning", "content": 5}], "input"),
        ([PART], None),
        ([MESSAGE, {"role": "user", "content": [PART]}], None),
        ([MESSAGE, {"role": "assistant", "content": None}], "input"),
        ([MESSAGE, CALLED, {"type": "function_call_output", "call_id": "1", "output": "5"}], None),
        ([MESSAGE, {"type": "reasoning", "summary": []}], None),
        ([MESSAGE, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]}], None),
    ]
]


@pytest.mark.parametrize(("path", "body", "field"), FAULTS, ids=str)
def test_faults_of_requests(path, body, field):
    fault = requests.find_fault(path, body)
    if field is None:
        assert fault is None
    else:
        assert fault[0] == field and fault[1].startswith(field)


LONGEST = 8  # max_position_embeddings of the model below
MISFITS = [
    (requests.TEXT, {"prompt": "a"}, None),
    (requests.TEXT, {"prompt": " \n"}, "prompt"),
    (requests.TEXT, {"prompt": "a", "max_tokens": LONGEST}, None),
    (requests.TEXT, {"prompt": "a", "max_tokens": LONGEST + 1}, "max_tokens"),
    (requests.CHAT, {"max_completion_tokens": 10**9}, "max_completion_tokens"),
    (requests.RESPONSES, {"max_output_tokens": LONGEST + 1}, "max_output_tokens"),
    (requests.CHAT, {"generation_config": '{"max_new_tokens": 8, "max_length": 8}'}, None),
    (requests.CHAT, {"generation_config": '{"max_new_tokens": 9}'}, "generation_config"),
    (requests.CHAT, {"generation_config": '{"max_length": 1e9}'}, "generation_config"),
]


@pytest.mark.parametrize(("path", "body", "field"), MISFITS, ids=str)
def test_what_the_model_cannot_answer(path, body, field):
    def tokenizer(text):
        return {"input_ids": text.split()}

    assert requests.find_fault(path, {"messages": MESSAGES, "input": "a"} | body) is None
    fault = requests.find_misfit(path, body, tiny_config(max_position_embeddings=LONGEST), tokenizer)
    if field is None:
        assert fault is None
    else:
        assert fault[0] == field and fault[1].startswith(field)
        assert field == "prompt" or f"expected at most {LONGEST}" in fault[1]
    if field != "prompt":  # a model without a longest length
        assert requests.find_misfit(path, body, object(), tokenizer) is None


@needs_server
@pytest.mark.parametrize("compose_key", [True, "uncached"])
def test_models_that_no_cache_has_room_for_generate_without(compose_key, tmp_path, monkeypatch):
    """The library would cache keys, whose composition weights would be missing at the second token."""
    from fastapi.testclient import TestClient

    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "checkpoints" / "dcformer-synthetic")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    randomize(convert_attention(model.eval(), compose_key=compose_key)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    started = []
    monkeypatch.setattr("uvicorn.Server.run", lambda server: started.append(server.config.app))
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--device", "cpu"])
    client = TestClient(started[0])
    batch = tokenizer("Peter owns", return_tensors="pt")
    ids = model.generate(**batch, max_new_tokens=3, do_sample=False, use_cache=False)[0]
    expected = tokenizer.decode(ids[batch["input_ids"].shape[1] :], skip_special_tokens=True)
    settings = {"max_new_tokens": 3, "eos_token_id": tokenizer.eos_token_id}
    for more in ({"max_tokens": 3}, {"generation_config": json.dumps(settings)}):
        answer = client.post(requests.TEXT, json={"model": str(tmp_path), "prompt": "Peter owns"} | more)
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == expected
    body = {"model": str(tmp_path), "prompt": "a", "generation_config": '{"max_new_tokens": 3, "use_cache": true}'}
    answer = client.post(requests.TEXT, json=body)
    assert answer.status_code == (400 if compose_key is True else 200)
    assert ("use_cache=True, but this model generates without a cache" in answer.text) == (compose_key is True)


@needs_server
def test_all_that_the_server_ignores_is_judged():
    """A field that a later version of the server accepts, and does not read, has to be put into one of the lists."""
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.response import ResponseHandler

    read = {"model", "generation_config", "seed", "stream", "temperature", "top_p"}
    read_too = {
        requests.CHAT: {"chat_template_kwargs", "frequency_penalty", "logit_bias", "max_tokens", "messages", "stop"}
        | {"tools", "max_completion_tokens"},
        requests.TEXT: {"frequency_penalty", "max_tokens", "prompt", "stop", "suffix"},
        requests.RESPONSES: {"input", "instructions", "max_output_tokens", "parallel_tool_calls", "tools"},
    }
    no_matter = {"access_programs", "background_options", "image", "metadata", "parallel_tool_calls", "reasoning"}
    no_matter |= {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort"}
    no_matter |= {"safety_identifier", "service_tier", "store", "stream_options", "user"}
    for path, handler in (
        (requests.CHAT, ChatCompletionHandler),
        (requests.TEXT, CompletionHandler),
        (requests.RESPONSES, ResponseHandler),
    ):
        ignored = handler._valid_params_class.__mutable_keys__ - read - read_too[path] - no_matter
        assert ignored <= set(requests._IGNORED[path])
        assert handler._unused_fields - no_matter - requests.SOMETIMES_IGNORED <= ignored
        assert set(requests._IGNORED[path]).isdisjoint(read | read_too[path])


def test_what_only_this_server_ignores_is_refused():
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 3}
    assert requests.find_fault(requests.CHAT, body) is None
    field, message = requests.find_fault(requests.CHAT, body, {"max_completion_tokens"})
    assert field == "max_completion_tokens" and "leave it out" in message


def test_what_asks_for_nothing_is_left_out():
    user = {"role": "user", "content": "a"}
    body = {"messages": [user | {"tool_calls": []}, user | {"tool_calls": [CALL]}], "stop": ["", "b"], "logit_bias": {}}
    kept = {"messages": [user, user | {"tool_calls": [CALL]}], "stop": ["b"]}
    assert requests.without_empty(requests.CHAT, body) == kept
    assert requests.without_empty(requests.TEXT, {"prompt": "a", "stop": ""}) == {"prompt": "a"}
    assert requests.without_empty(requests.CHAT, [1]) == [1]


@needs_server
def test_converted_models_are_served_with_their_composition(tmp_path):
    """The library's manager would load, and serve, the plain model."""
    from transformers.cli.serving import model_manager

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    bart = BartConfig(vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, **heads)
    ids = torch.arange(9)[None]
    for model, compose_key in (
        (LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)), "uncached"),
        (BartForConditionalGeneration(bart), "uncached"),  # with its encoder
        (BertForMaskedLM(BertConfig(vocab_size=32, **sizes)), True),  # which generates nothing
    ):
        randomize(convert_attention(model.eval(), compose_key=compose_key))
        folder = tmp_path / type(model).__name__
        model.save_pretrained(folder)
        with _own_application():
            served = model_manager.ModelManager(device="cpu", dtype="float32")._load_model(str(folder))
        assert type(served) is type(model)
        if type(model) is LlamaForCausalLM:  # a folder that does not name its class is of the usual one
            config = json.loads((folder / "config.json").read_text())
            del config["architectures"]
            (folder / "config.json").write_text(json.dumps(config))
            with _own_application():
                served = model_manager.ModelManager(device="cpu", dtype="float32")._load_model(str(folder))
        torch.testing.assert_close(served(ids).logits, model(ids).logits)


@needs_server
def test_what_the_server_tells_the_template_is_known():
    """Arguments that a later version of the server sets itself have to be put into the list."""
    from transformers.cli.serving import chat_completion, response

    for module in (chat_completion, response):
        (call,) = [
            node
            for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "apply_chat_template"
        ]
        assert {keyword.arg for keyword in call.keywords if keyword.arg} <= requests._OF_TEMPLATES
    for name in requests._OF_TEMPLATES:
        for path, rest in ((requests.CHAT, {"messages": MESSAGES}), (requests.RESPONSES, {"input": "a"})):
            field, told = requests.find_fault(path, rest | {"chat_template_kwargs": {name: False}})
            assert field == "chat_template_kwargs" and name in told


def test_a_faulty_template_is_a_bad_request():
    space = {"__name__": "transformers.utils.chat_template_utils"}
    exec("import jinja2\nasync def application(*_):\n    jinja2.Environment().from_string('{{ x')", space)
    start, body = answer_to(space["application"])
    assert start["status"] == 400 and b"unexpected end of template" in body["body"]


@pytest.mark.parametrize("whole", [True, False], ids=["body", "generation_config"])
def test_what_is_nested_too_deeply_is_a_bad_request(whole):
    deep = "[" * 100_000
    body = deep if whole else json.dumps({"messages": GOOD["messages"], "generation_config": deep})
    start, answer = answer_to(None, body.encode())
    assert start["status"] == 400 and len(answer["body"]) < 1000


GOOD = {"messages": [{"role": "user", "content": "a"}]}


def answer_to(application, body: bytes = json.dumps(GOOD).encode()) -> list[dict]:
    """What the checks send for a request, a good one by default, where the server is this application."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": requests.CHAT}
    asyncio.run(requests.RequestChecks(application)(scope, receive, send))
    return sent


@pytest.mark.parametrize("module", ["dcformer.serving.server", "dcformer.kernels.ops", "dcformer.chunked_dcformer"])
def test_a_bug_within_a_request_is_no_bad_request(module):
    """A ValueError of libraries and of models is a refusal; elsewhere in this package it is a bug."""
    code = "async def application(*_):\n    raise ValueError('raised here')"
    places = {name: {"__name__": name} for name in ("transformers.generation.utils", module)}
    for space in places.values():
        exec(code, space)
    start, body = answer_to(places["transformers.generation.utils"]["application"])
    assert start["status"] == 400 and b"raised here" in body["body"]
    if module.endswith("_dcformer"):
        start, body = answer_to(places[module]["application"])
        assert start["status"] == 400
    else:
        with pytest.raises(ValueError, match="raised here"):
            answer_to(places[module]["application"])


@pytest.mark.parametrize("attn_implementation", ["dcformer_chunked", "eager"])
def test_continuous_batching_is_refused_with_the_reason(attn_implementation):
    model = DCFormerForCausalLM._from_config(tiny_config(), attn_implementation=attn_implementation)
    for call in (model.init_continuous_batching, lambda: model.generate_batch([[1, 2, 3]])):
        with pytest.raises(NotImplementedError, match=r"composition weights behind them.*padded batch"):
            call()
    assert model.config._attn_implementation == attn_implementation


@needs_server
def test_server_refuses_continuous_batching_before_it_loads(capsys):
    assert main(["no-such-model", "--continuous-batching"]) == 1
    assert "has no --continuous-batching" in capsys.readouterr().err


@needs_server
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "dcformer-serve absent: "),
        (["without_tokenizer"], "dcformer-serve without_tokenizer: "),
        (["fused"], "fused has trained mixtures of heads"),
        (["damaged"], "damaged/pytorch_model.bin is damaged"),
        (["bundled", "--attn-implementation", "sdpa"], "attn_implementation='sdpa' cannot compose attention heads"),
        (["bundled", "--attn-implementation", "dcformer_chunked"], "Unsupported attention implementation"),
        (["bundled", "--dtype", "float12"], "'float12'"),
        (["bundled", "--device", "cuda"], "--device 'cuda': this PyTorch finds no CUDA device"),
        (["bundled", "--device=cuda:7"], "--device 'cuda:7': this PyTorch finds no CUDA device"),
        (["bundled", "--device", "0"], "--device '0': "),
        (["--device", "gpu"], "--device 'gpu': Expected one of cpu, cuda"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_models_that_cannot_be_served(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    os.symlink(REPOSITORY / "checkpoints" / "dcformer-synthetic", tmp_path / "bundled")
    DCFormerForCausalLM(tiny_config()).save_pretrained(tmp_path / "without_tokenizer")
    shutil.copytree(tmp_path / "bundled", tmp_path / "fused", ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=412, **sizes)).save_pretrained(tmp_path / "fused")  # the library's to load
    (tmp_path / "fused" / "operators.safetensors").touch()
    shutil.copytree(tmp_path / "bundled", tmp_path / "damaged", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "damaged" / "pytorch_model.bin").touch()
    monkeypatch.setattr("uvicorn.Server.run", lambda _: pytest.fail("the server starts"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if arguments[-1] == "0" and torch.accelerator.is_available():
        pytest.skip("device 0 exists here")
    assert main(arguments) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert message in line


@needs_server
def test_models_that_requests_name(tmp_path, monkeypatch):
    """Of a server without a model of its own; refusals have the headers of answers, those for browsers too."""
    from fastapi.testclient import TestClient

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "checkpoints" / "dcformer-synthetic")
    for name, class_ in (("whole", DCFormerForCausalLM), ("classifier", DCFormerForSequenceClassification)):
        class_(tiny_config(vocab_size=len(tokenizer))).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    started = []
    monkeypatch.setattr("uvicorn.Server.run", lambda server: started.append(server.config.app))
    with pytest.raises(SystemExit):
        main(["--enable-cors", "--device", "cpu"])
    client, origin = TestClient(started[0]), {"Origin": "http://example.com"}
    for model, status, told in (
        ("whole", 200, ""),
        ("absent", 400, "no such file or folder"),
        (None, 400, "names none"),
        ("", 400, "names none"),
        (3, 400, "must be a text"),
        ("classifier", 400, "lacks lm_head.weight"),
        ("adapter", 400, "merge_and_unload()"),
    ):
        body = {"prompt": "Peter owns", "max_tokens": 1} | ({} if model is None else {"model": model})
        answer = client.post(requests.TEXT, json=body, headers=origin)
        assert answer.status_code == status and told in answer.text
        assert answer.headers["access-control-allow-origin"] and answer.headers["x-request-id"]
        if status == 400:
            assert answer.json()["error"]["param"] == "model"


def test_missing_extra(monkeypatch, capsys):
    pytest.importorskip("typer")
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    assert main([]) == 1
    assert "pip install 'dcformer[serve]'" in capsys.readouterr().err


def test_unknown_option_is_wrong_usage():
    if not is_serve_available():
        pytest.skip("the extra [serve] is not installed")
    with pytest.raises(SystemExit) as exit_:
        main(["--no-such-option"])
    assert exit_.value.code == 2
