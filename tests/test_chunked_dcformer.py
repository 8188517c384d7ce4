"""The operator of "dcformer_chunked": tracing, export, transforms, and what it asks of the device."""

import pytest
import torch
from helpers import randomize, tiny_config
from packaging.version import Version
from test_attention_dcformer import Inputs, small_blocks
from torch.utils._python_dispatch import TorchDispatchMode

from dcformer import DCFormerForCausalLM, chunked_dcformer
from dcformer.attention_dcformer import eager_attention
from dcformer.chunked_dcformer import chunked_attention
from dcformer.masks_dcformer import chunked_mask


def operator_arguments(problem, mask=(), dropout=0.0, window=None):
    """Arguments of the operator for a problem."""
    tensors = problem.tensors
    weights = chunked_dcformer.flatten_weights(problem.weights("pre"), problem.weights("post"))
    plan = chunked_dcformer._plan(problem.groups, not len(mask), window, weights)
    seed = torch.tensor(7) if dropout else None
    states = (tensors["query"], tensors["key"], tensors["value"])
    leaves = [w.detach().requires_grad_() for w in weights if w is not None]
    return (*states, leaves, plan, list(mask), 0.3, dropout, seed)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"pre": "", "post": ""}, {}),
        ({"heads": 6, "kv_heads": 3, "groups": 3, "dtype": torch.float32}, {"window": 3}),
        ({"pre": "static query_low", "post": "key_low key_gate"}, {"dropout": 0.25}),
        ({"batch": 1}, {"mask": "intervals"}),
        ({}, {"mask": "whole"}),
        ({"kv_heads": 4}, {"strides": "other"}),
        ({"heads": 6, "kv_heads": 3, "groups": 3}, {"strides": "other"}),
    ],
    ids=["all", "plain", "window", "dropout", "intervals", "mask", "strides", "strides of groups"],
)
def test_operators_pass_opcheck(fields, options, monkeypatch):
    small_blocks(monkeypatch, query_block=4, scores=200)
    problem = Inputs(length=9, key_length=9, **fields)
    mask = {
        "intervals": [torch.zeros(1, 9, dtype=torch.int32), torch.arange(1, 10, dtype=torch.int32)[None]],
        "whole": [torch.rand(2, 1, 9, 9) < 0.7],
    }.get(options.pop("mask", None), [])
    has_other_strides = options.pop("strides", None)
    arguments = operator_arguments(problem, mask, **options)
    if has_other_strides:  # as a user's own tensors may have
        arguments[3][:] = [w.mT.contiguous().mT.detach().requires_grad_() for w in arguments[3]]
    torch.library.opcheck(chunked_dcformer._forward, arguments)
    grad = problem.grad.detach()
    detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments]
    detached[3] = [w.detach() for w in arguments[3]]
    torch.library.opcheck(chunked_dcformer._backward, (grad, *detached))


def test_a_mask_of_no_keys():
    problem = Inputs(length=20, key_length=0)
    mask = torch.ones(1, 1, 20, 0, dtype=torch.bool)
    assert not problem.call(chunked_attention, mask)[0].any()


# --- torch.compile ----------------------------------------------------------------------------------------------------


class Graphs:
    """A backend of torch.compile that counts graphs and the nodes of each, and runs them as they are."""

    def __init__(self):
        self.nodes = []

    def __call__(self, graph, inputs):
        self.nodes.append(len(graph.graph.nodes))
        return graph


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model(**fields):
    return randomize(DCFormerForCausalLM(tiny_config(attn_implementation="dcformer_chunked", **fields)))


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_the_graph_of_a_layer_does_not_depend_on_the_length(padded):
    """Up to 16 queries, where no custom operator is needed for memory to be linear, it is another one."""
    nodes = {}
    for layers in (1, 2):
        for length in (16, 17, 300):
            network = model(num_hidden_layers=layers, layer_pattern="LG", max_position_embeddings=512)
            graphs = Graphs()
            mask = torch.ones(2, length, dtype=torch.long)
            mask[0, :5] = 0
            ids = torch.randint(97, (2, length))
            expected = network(ids, attention_mask=mask if padded else None, use_cache=False).logits
            compiled = torch.compile(network, backend=graphs, fullgraph=True, dynamic=False)
            found = compiled(ids, attention_mask=mask if padded else None, use_cache=False).logits
            visible = mask.bool() if padded else torch.ones_like(mask).bool()
            torch.testing.assert_close(found[visible], expected[visible])
            (nodes[layers, length],) = graphs.nodes
    assert nodes[1, 17] == nodes[1, 300] and nodes[2, 17] == nodes[2, 300]
    assert all(nodes[2, length] - nodes[1, length] < 400 for length in (16, 300))


def left_padded(length):
    """Token ids, mask and arguments of a batch of two, the first one padded."""
    ids = torch.randint(97, (2, length))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("dynamic", "count"), [(True, 1), (None, 2)], ids=["dynamic", "automatic"])
def test_dynamic_lengths_are_one_graph(dynamic, count, padded):
    graphs = Graphs()
    network = model(max_position_embeddings=512)
    compiled = torch.compile(network, backend=graphs, fullgraph=True, dynamic=dynamic)
    for length in (20, 33, 47, 21, 300):
        inputs = left_padded(length)
        if not padded:
            del inputs["attention_mask"]
        torch.testing.assert_close(compiled(**inputs).logits, network(**inputs).logits)
    assert len(graphs.nodes) == count


PLAIN = {"compose_pre": False, "compose_post": False, "compose_query": False, "compose_key": False}


@pytest.mark.parametrize("fields", [{"num_key_value_heads": None, "head_embeddings": "add"}, PLAIN], ids=str)
def test_dynamic_lengths_are_one_graph_in_other_models(fields):
    graphs = Graphs()
    network = model(max_position_embeddings=512, **fields)
    compiled = torch.compile(network, backend=graphs, fullgraph=True, dynamic=True)
    for length in (20, 33, 47):
        inputs = left_padded(length)
        torch.testing.assert_close(compiled(**inputs).logits, network(**inputs).logits)
        del inputs["attention_mask"]
        torch.testing.assert_close(compiled(**inputs).logits, network(**inputs).logits)
    assert len(graphs.nodes) == 2  # with a mask and without


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_training_step_compiles_whole_with_dropout(checkpointing):
    """The compiled step has its own random numbers: it must run, differentiate and drop the same weights both ways."""
    network = model(attention_dropout=0.5, hidden_dropout=0.25).train()
    if checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    graphs = Graphs()
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    ids = torch.randint(97, (2, 24))
    losses = []
    for _ in range(2):
        network.zero_grad()
        loss = compiled(ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] != losses[1]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    compiled = torch.compile(network, backend=graphs, fullgraph=True)
    if not checkpointing:
        torch.manual_seed(3)
        expected = network(ids, use_cache=False).logits
        torch.manual_seed(3)
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected)
        assert len(graphs.nodes) == 1


def test_compiled_gradients_are_those_of_eager():
    network = model().double()
    ids = torch.randint(97, (2, 40))
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :7] = 0
    labels = ids.masked_fill(mask == 0, -100)
    grads = {}
    for name in ("eager", "compiled"):
        network.set_attn_implementation("eager" if name == "eager" else "dcformer_chunked")
        step = network if name == "eager" else torch.compile(network, backend="aot_eager", fullgraph=True)
        network.zero_grad()
        step(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        grads[name] = {key: p.grad.clone() for key, p in network.named_parameters()}
    for key, expected in grads["eager"].items():
        torch.testing.assert_close(grads["compiled"][key], expected, rtol=1e-9, atol=1e-12)


# Models whose graph is another.
EXPORTED = {
    "global": {"layer_pattern": "G", "sliding_window": None},
    "static": {"compose_static": True},
    "head maps": {
        "num_key_value_heads": 4,
        "key_head_map": [[0, 1, 1, 0]] * 2,
        "value_head_map": [[0, 3, 1, 2]] * 2,
    },
    "head embeddings": {"head_embeddings": "mul", "num_key_value_heads": 1},
}


def check_export(network, strict, padded):
    """Exports with a dynamic length; what comes out has the model's numbers at every length, few queries or many."""
    inputs = left_padded(24)
    if not padded:
        del inputs["attention_mask"]
    length = torch.export.Dim("length", min=2, max=64)
    shapes = {name: None if name == "use_cache" else {1: length} for name in inputs}
    program = torch.export.export(network, (), inputs, dynamic_shapes=shapes, strict=strict)
    for length in (2, 9, 24, 51):
        inputs = {name: value for name, value in left_padded(length).items() if name in inputs}
        torch.testing.assert_close(program.module()(**inputs).logits, network(**inputs).logits)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_dynamic_length(strict, padded):
    check_export(model(), strict, padded)


@pytest.mark.slow
@pytest.mark.parametrize("fields", EXPORTED.values(), ids=EXPORTED.keys())
def test_export_of_other_models_with_a_mask(fields):
    check_export(model(**fields), False, True)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [4, 2, 1])
def test_export_of_eager_with_a_mask(shared):
    if shared == 2 and Version(torch.__version__) < Version("2.13"):  # of 2.11 and 2.13, which were tried
        pytest.skip("torch 2.11 does not see that the smaller of T * T and 2 * T * T is T * T")
    network = model(num_key_value_heads=shared)
    network.set_attn_implementation("eager")
    check_export(network, False, True)


# --- transforms and other devices -------------------------------------------------------------------------------------


def test_transforms_name_eager():
    problem = Inputs(length=20, key_length=20)
    query = problem.tensors["query"]

    def loss(query):
        return problem.call(chunked_attention, tensors=problem.tensors | {"query": query})[0].square().sum()

    transforms = {
        "grad": lambda: torch.func.grad(loss)(query),
        "vmap": lambda: torch.func.vmap(loss)(query[None]),
        "jacrev": lambda: torch.func.jacrev(loss)(query),
        "jvp": lambda: torch.func.jvp(loss, (query,), (torch.ones_like(query),)),
    }
    for transform in transforms.values():
        with pytest.raises(NotImplementedError, match=r"torch.func.*attn_implementation='eager'"):
            transform()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query.detach(), torch.ones_like(query))
        with pytest.raises(NotImplementedError, match=r"forward-mode.*attn_implementation='eager'"):
            loss(dual)
    (grad,) = torch.autograd.grad(loss(query), query, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives.*attn_implementation='eager'"):
        grad.sum().backward()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_transforms_of_compiled_functions_name_eager(fullgraph):
    """They would leave out what the operator contributes to a derivative."""
    network, states, direction = model().double(), torch.randn(1, 20, 32).double(), torch.randn(1, 20, 32).double()
    network.set_attn_implementation("dcformer_chunked")

    def call(states):
        return network(inputs_embeds=states, use_cache=False).logits

    def slope(states):
        return torch.func.jvp(call, (states,), (direction,))[1]

    with pytest.raises(Exception, match=r"torch.func.*attn_implementation='eager'"):  # Dynamo's, in a full graph
        torch.compile(slope, backend="eager", fullgraph=fullgraph)(states)
    network.set_attn_implementation("eager")
    torch._dynamo.reset()
    found = torch.compile(slope, backend="eager", fullgraph=fullgraph)(states)
    step = 1e-6
    with torch.no_grad():
        expected = (call(states + step * direction) - call(states - step * direction)) / (2 * step)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-3, atol=1e-3)  # logits are rounded


def test_batched_gradients_name_eager():
    problem = Inputs(length=20, key_length=20)
    query = problem.tensors["query"]
    output, _ = problem.call(chunked_attention)
    with pytest.raises(NotImplementedError, match=r"batched gradients.*attn_implementation='eager'"):
        torch.autograd.grad(output, query, torch.randn(3, *output.shape), is_grads_batched=True)


def test_transforms_work_under_eager():
    """Per-sample gradients, a directional derivative and a second derivative of a whole model."""
    network = model().double()
    network.set_attn_implementation("eager")
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    ids = torch.randint(97, (3, 9))

    def loss(parameters, ids):  # the library's rounds logits to float32
        logits = torch.func.functional_call(network, parameters, (ids,), {"use_cache": False}).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, ids[:, None])
    name = "model.layers.0.self_attn.compose.qkw"
    for row in range(3):
        alone = torch.func.grad(loss)(parameters, ids[row : row + 1])
        torch.testing.assert_close(each[name][row], alone[name], rtol=1e-9, atol=1e-12)
    direction = {key: torch.zeros_like(p) for key, p in parameters.items()}
    direction[name] = torch.nn.functional.normalize(torch.randn_like(parameters[name]), dim=(0, 1))
    _, slope = torch.func.jvp(lambda p: loss(p, ids), (parameters,), (direction,))
    grad = torch.func.grad(loss)(parameters, ids)[name]
    torch.testing.assert_close(slope, (grad * direction[name]).sum())
    live = network.model.layers[0].self_attn.compose.qkw
    (first,) = torch.autograd.grad(loss(dict(network.named_parameters()), ids), live, create_graph=True)
    (second,) = torch.autograd.grad((first * direction[name]).sum(), live)
    step = 1e-5
    ahead, behind = (
        torch.func.grad(loss)(parameters | {name: parameters[name] + sign * step * direction[name]}, ids)[name]
        for sign in (1, -1)
    )
    torch.testing.assert_close(second, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_model_runs_on_the_meta_device(implementation, padded):
    network = model().to("meta")
    network.set_attn_implementation(implementation)
    ids = torch.zeros(2, 40, dtype=torch.long, device="meta")
    output = network(ids, attention_mask=torch.ones_like(ids) if padded else None, labels=ids)
    assert output.logits.shape == (2, 40, 97) and output.logits.is_meta
    output.loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in network.parameters())
    step = network(ids[:, :1], past_key_values=output.past_key_values, use_cache=True)
    assert step.logits.shape == (2, 1, 97)


class HostReads(TorchDispatchMode):
    """Counts what waits for the device: operations that hand its values, or shapes made of them, to Python."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.count += name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")
        return function(*args, **(kwargs or {}))

    def tolist(self, tensor):
        self.count += 1
        return tensor.numpy().tolist()


@pytest.mark.parametrize("kind", ["plain", "padded", "gaps", "tensor"])
def test_host_reads_do_not_grow_with_the_length(kind, monkeypatch):
    small_blocks(monkeypatch, query_block=8, scores=1 << 10)
    counts = []
    for length in (40, 160):
        problem = Inputs(length=length, key_length=length, batch=1, dtype=torch.float32)
        real = torch.ones(1, length, dtype=torch.bool)
        real[0, : 3 if kind == "padded" else 0] = False
        real[0, 20 : 23 if kind == "gaps" else 20] = False
        mask = chunked_mask(1, length, length, attention_mask=real)
        if kind == "tensor":
            mask = mask.rows(0, length)
        elif kind != "plain":
            mask.tensors()  # made once a forward pass, for all layers
        with HostReads() as reads, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", lambda tensor: reads.tolist(tensor))  # which is not an operation
            output = problem.call(chunked_attention, mask)[0]
            forward = reads.count
            output.backward(problem.grad)
        counts.append((forward, reads.count - forward))
    assert counts[0] == counts[1] == ((0, 0) if kind == "plain" else (1, 1))


def test_the_definition_bounds_the_operator_for_one_head_a_group(monkeypatch):
    """Groups of a single head, and fewer queries than a matrix product likes."""
    small_blocks(monkeypatch, query_block=2, scores=8)
    problem = Inputs(heads=3, kv_heads=3, groups=3, length=5, key_length=9)
    expected, found = (problem.run(attention) for attention in (eager_attention, chunked_attention))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10)
