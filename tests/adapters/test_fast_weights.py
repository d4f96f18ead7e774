"""Fast weights on tiny decoders: what is summed, what is read, and what must not change."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.adapters.fast_files import FastManifest, load_memory, read_manifest, save_memory
from fedloom.adapters.fast_sums import Passage, batch_pairs, compile_sums
from fedloom.adapters.fast_weights import FastMemory, ReadOut, hung_on, middle_places
from fedloom.errors import Refusal
from fedloom.models import tiny
from fedloom.rules.solving import naive_solve, solve

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
LAST, MIDDLE = 2, 1  # the tiny models have two blocks
TEXTS = (
    (5, 9, 5, 200, 31, 8),
    (44, 45, 46),
    (7, 90, 91, 92, 17, 3, 60, 61, 62, 63, 64, 65, 66, 67),
)
QUERY = torch.tensor([[9, 5, 200, 31, 44, 7, 90, 3, 60, 12, 100, 101, 102, 103, 104, 105]])


@pytest.fixture(params=FAMILIES)
def model(request):
    return tiny.build(request.param).double().requires_grad_(False).eval()


@pytest.fixture
def llama():
    return tiny.build("llama").double().requires_grad_(False).eval()


def passages(texts=TEXTS):
    return [Passage(ids) for ids in texts]


def memory_of(model, *, r=0.5, alpha=1.0, readouts=None, **how):
    places = [*(readouts or {}), LAST]
    sums = compile_sums(model, passages(), places=places, readouts=readouts)
    weights = {place: solve(gram, alpha=alpha).weights for place, gram in sums.items()}
    return FastMemory(model, weights, r=r, readouts=readouts, **how)


def logits(model, ids=QUERY, **how):
    with torch.inference_mode():
        return model(ids, use_cache=False, **how).logits


def naive_pairs(model, ids, place):
    """One pair at a time, from hidden states that transformers itself returns."""
    row = torch.tensor([ids])
    with torch.no_grad():
        streams = list(model(row, output_hidden_states=True).hidden_states)
        streams[-1] = None  # behind the norm; taken by a hook below
        caught = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, x: caught.append(x[0]))
        model(row)
        hook.remove()
        embedded = model.get_input_embeddings()(row)[0]
    for t in range(len(ids) - 1):
        if place == LAST:
            yield caught[0][0, t].numpy(), embedded[t + 1].numpy()
        else:
            yield streams[place][0, t].numpy(), streams[place][0, t + 1].numpy()


@pytest.mark.parametrize("place", [MIDDLE, LAST])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_sums_are_those_of_the_pairs_one_by_one(model, place, batch_size):
    found = compile_sums(model, passages(), places=[MIDDLE, LAST], batch_size=batch_size)[place]
    gram, cross, count = np.zeros((64, 64)), np.zeros((64, 64)), 0
    for ids in TEXTS:
        for key, value in naive_pairs(model, ids, place):
            gram += np.outer(key, key)
            cross += np.outer(key, value)
            count += 1
    assert found.count == count == sum(len(ids) - 1 for ids in TEXTS)
    np.testing.assert_allclose(found.dense(), gram, rtol=1e-10, atol=1e-10 * np.abs(gram).max())
    np.testing.assert_allclose(found.cross, cross, rtol=1e-10, atol=1e-10 * np.abs(cross).max())


def test_values_carry_gemmas_scale():
    model = tiny.build("gemma3").double()
    ids = torch.tensor([[5, 9]])
    _, values = batch_pairs(model, ids, torch.ones_like(ids), [LAST])[LAST]
    torch.testing.assert_close(values[0], 8.0 * model.get_input_embeddings().weight[9].detach())


def test_read_is_the_naive_solution_mixed_in(model):
    memory = memory_of(model, r=0.3, alpha=0.7)
    pairs = [pair for ids in TEXTS for pair in naive_pairs_off(memory, ids)]
    keys, values = (np.stack(x) for x in zip(*pairs, strict=True))
    w = torch.from_numpy(naive_solve(keys, values, alpha=0.7)).float().double()
    with memory.off():
        stream = caught_stream(model)
    found = logits(model)
    memory.detach()
    mixed = 0.7 * stream + 0.3 * stream @ w
    wanted = model.get_output_embeddings()(model.model.norm(mixed))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)  # W is held in float32


def naive_pairs_off(memory, ids):
    with memory.off():
        yield from naive_pairs(memory.model, ids, LAST)


def caught_stream(model):
    caught = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, x: caught.append(x[0].clone()))
    logits(model)
    hook.remove()
    return caught[0].clone()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_pair(model, side):
    ids = TEXTS[0]
    plain = torch.tensor([ids])
    pad = [99] * 5
    padded = torch.tensor([[*pad, *ids] if side == "left" else [*ids, *pad]])
    real = torch.tensor([[*([0] * 5), *([1] * 6)] if side == "left" else [*([1] * 6), *([0] * 5)]])
    alone = batch_pairs(model, plain, torch.ones_like(plain), [MIDDLE, LAST])
    for place, (keys, values) in batch_pairs(model, padded, real, [MIDDLE, LAST]).items():
        assert len(keys) == len(ids) - 1
        torch.testing.assert_close(keys, alone[place][0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(values, alone[place][1], rtol=1e-9, atol=1e-9)


def test_a_masked_token_is_in_no_pair(llama):
    ids, real = torch.tensor([[5, 9, 7, 8, 3]]), torch.tensor([[1, 1, 0, 1, 1]])
    keys, values = batch_pairs(llama, ids, real, [LAST])[LAST]
    table = llama.get_input_embeddings().weight
    assert len(keys) == 2
    torch.testing.assert_close(values, table[[9, 3]].detach())


def test_answers_only_pairs_begin_at_first(llama):
    ids = torch.tensor([[5, 9, 7, 8, 3], [256, 256, 5, 9, 7]])
    real = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    first = torch.tensor([3, 2])  # counted among real tokens
    _, values = batch_pairs(llama, ids, real, [LAST], first_B=first)[LAST]
    torch.testing.assert_close(values, llama.get_input_embeddings().weight[[8, 3, 7]].detach())


def test_changing_a_token_changes_nothing_before_it(model):
    readouts = {MIDDLE: trained_readout()}
    memory = memory_of(model, readouts=readouts)
    before = logits(model)
    for place in (1, 7, 15):
        changed = QUERY.clone()
        changed[0, place] = 222
        after = logits(model, changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place:], before[:, place:])
    memory.detach()


def trained_readout(seed=0):
    torch.manual_seed(seed)
    readout = ReadOut(64).double()
    with torch.no_grad():
        readout.P_DD.normal_(std=0.05)
        readout.gate_2D.normal_(std=0.05)
    return readout


def test_nothing_is_heard_at_zero_and_detach_restores(model):
    base = logits(model)
    empty = FastMemory(model, {}, r=0.9)
    assert torch.equal(logits(model), base)
    empty.detach()
    memory = memory_of(model, r=0.5)
    heard = logits(model)
    assert not torch.equal(heard, base)
    with memory.off():
        assert torch.equal(logits(model), base)
    memory.r = 0.0
    assert torch.equal(logits(model), base)
    memory.r = 0.5
    assert torch.equal(logits(model), heard)
    assert memory.detach() is model
    assert hung_on(model) is None
    assert torch.equal(logits(model), base)
    assert not model.model.norm._forward_pre_hooks


def test_an_untrained_middle_memory_changes_nothing(model):
    base = logits(model)
    readouts = {MIDDLE: ReadOut(64)}
    sums = compile_sums(model, passages(), places=[MIDDLE], readouts=readouts)
    weights = {MIDDLE: solve(sums[MIDDLE]).weights}
    memory = FastMemory(model, weights, readouts=readouts)
    assert torch.equal(logits(model), base)
    with torch.no_grad():  # and with a graph, where the path is taken
        memory.model.eval()
    with torch.enable_grad():
        found = model(QUERY, use_cache=False).logits
    assert torch.equal(found.detach(), base)
    with torch.no_grad():
        readouts[MIDDLE].P_DD.normal_(std=0.1)
    assert not torch.equal(logits(model), base)
    memory.detach()


def test_middle_values_are_gated(llama):
    readout = trained_readout()
    ids = torch.tensor([TEXTS[0]])
    real = torch.ones_like(ids)
    keys, plain = batch_pairs(llama, ids, real, [MIDDLE])[MIDDLE]
    kept, gated = batch_pairs(llama, ids, real, [MIDDLE], readouts={MIDDLE: readout})[MIDDLE]
    assert torch.equal(keys, kept)
    for k, v, g in zip(keys, plain, gated, strict=True):
        score = float(readout.gate_2D.detach() @ torch.cat((k, v)))
        torch.testing.assert_close(g, v / (1 + np.exp(-score)))


@pytest.mark.parametrize("match_scale", [False, True])
def test_no_nan_at_one(model, match_scale):
    memory = memory_of(model, r=1.0, match_scale=match_scale)
    assert torch.isfinite(logits(model)).all()
    memory.weights[LAST].zero_()  # nothing read, and nothing else heard
    assert torch.isfinite(logits(model)).all()
    memory.detach()


def test_matched_scale_brings_what_is_read_to_the_stream(llama):
    memory = memory_of(llama, r=1.0, match_scale=True)
    with memory.off():
        stream = caught_stream(llama)
    mixed = caught_stream(llama)
    memory.detach()
    torch.testing.assert_close(mixed.norm(dim=-1), stream.norm(dim=-1))


def test_token_by_token_is_prefill(model):
    memory = memory_of(model, readouts={MIDDLE: trained_readout()})
    whole, cache, steps = logits(model), None, []
    with torch.inference_mode():
        for t in range(QUERY.shape[1]):
            out = model(QUERY[:, t : t + 1], cache=cache, use_cache=True)
            cache = out.cache
            steps.append(out.logits)
    memory.detach()
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-9, atol=1e-9)


def test_generation_of_transformers_reads_the_memory(llama):
    memory = memory_of(llama, r=0.8)
    made = llama.generate(QUERY, max_new_tokens=3, do_sample=False, attention_mask=QUERY > 0)
    ids = QUERY
    for _ in range(3):
        ids = torch.cat((ids, logits(llama, ids)[:, -1:].argmax(-1)), dim=1)
    memory.detach()
    assert torch.equal(made[:, : ids.shape[1]], ids)


def test_one_pass_a_sequence_no_graph_and_frozen_weights(model):
    before = {n: w.clone() for n, w in model.state_dict().items()}
    passes, graphs = [], []

    def note(*_):
        passes.append(torch.is_inference_mode_enabled())

    def packed(x):
        graphs.append(x)
        return x

    hook = model.model.register_forward_pre_hook(note)
    with torch.autograd.graph.saved_tensors_hooks(packed, packed):
        model.requires_grad_(True)  # even so
        compile_sums(model, passages(), places=[MIDDLE, LAST], readouts={MIDDLE: ReadOut(64)})
    hook.remove()
    assert passes == [True] * len(TEXTS)
    assert not graphs
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_sums_do_not_hear_what_hangs(llama):
    plain = compile_sums(llama, passages(), places=[LAST])[LAST]
    memory = memory_of(llama, readouts={MIDDLE: trained_readout()})
    again = compile_sums(llama, passages(), places=[LAST])[LAST]
    memory.detach()
    assert np.array_equal(plain.packed, again.packed)
    assert np.array_equal(plain.cross, again.cross)


def test_sums_of_halves_are_the_sums_of_the_whole(llama):
    whole = compile_sums(llama, passages(), places=[LAST])[LAST]
    parts = [compile_sums(llama, passages([t]), places=[LAST])[LAST] for t in reversed(TEXTS)]
    total = parts[0] + parts[1] + parts[2]
    np.testing.assert_allclose(total.packed, whole.packed, rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(total.cross, whole.cross, rtol=1e-12, atol=1e-9)


def test_half_precision_states_are_summed_in_double():
    model = tiny.build("llama").to(torch.bfloat16)
    found = compile_sums(model, passages(), places=[LAST])[LAST]
    keys, values = [], []
    for ids in TEXTS:
        row = torch.tensor([ids])
        k, v = batch_pairs(model, row, torch.ones_like(row), [LAST])[LAST]
        keys.append(k.double().numpy())
        values.append(v.double().numpy())
    k = np.concatenate(keys)
    assert found.packed.dtype == np.float64
    np.testing.assert_allclose(found.dense(), k.T @ k, rtol=1e-12, atol=1e-9)


def test_places():
    assert middle_places(48, 23) == list(range(2, 48, 2))
    assert middle_places(30, 1) == [15]
    assert middle_places(2, 0) == []
    with pytest.raises(Refusal, match="2 middle memories"):
        middle_places(2, 2)


def test_bad_memories_are_refused(llama):
    with pytest.raises(Refusal, match=r"r = 1\.5"):
        FastMemory(llama, {}, r=1.5)
    with pytest.raises(Refusal, match="expected \\(64, 64\\)"):
        FastMemory(llama, {LAST: np.zeros((3, 3))})
    with pytest.raises(Refusal, match="a read-out for each place"):
        FastMemory(llama, {MIDDLE: np.zeros((64, 64))})
    with pytest.raises(Refusal, match="place 3"):
        FastMemory(llama, {3: np.zeros((64, 64))})
    with pytest.raises(Refusal, match="no blocks with a final norm"):
        FastMemory(tiny.build("mamba"), {})
    assert hung_on(llama) is None
    memory = FastMemory(llama, {})
    with pytest.raises(ValueError, match="already"):
        FastMemory(llama, {})
    memory.detach()


ABOUT = FastManifest("base", "tokens", (MIDDLE, LAST), 20, 0.8, 0.5, match_scale=False)


@pytest.fixture
def saved(llama, tmp_path):
    memory = memory_of(llama, alpha=0.8, readouts={MIDDLE: trained_readout().float()})
    path = tmp_path / "m.safetensors"
    save_memory(path, memory, ABOUT)
    found = logits(llama)
    memory.detach()
    return path, found


def test_a_saved_memory_reads_the_same(llama, saved):
    path, wanted = saved
    assert read_manifest(path) == ABOUT
    assert path.stat().st_mode & 0o777 == 0o600
    memory = load_memory(path, llama, base="base", tokenizer="tokens")
    assert torch.equal(logits(llama), wanted)
    memory.detach()


def test_another_model_is_refused(llama, saved, tmp_path):
    path, _ = saved
    with pytest.raises(Refusal, match="belongs to base base"):
        load_memory(path, llama, base="other", tokenizer="tokens")
    with pytest.raises(Refusal, match="belongs to tokenizer"):
        load_memory(path, llama, base="base", tokenizer="other")
    with pytest.raises(Refusal, match="no such file"):
        load_memory(tmp_path / "none", llama, base="base", tokenizer="tokens")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(Refusal, match="cut short"):
        load_memory(cut, llama, base="base", tokenizer="tokens")
    assert hung_on(llama) is None


def test_a_file_that_is_not_as_it_says_is_refused(llama, tmp_path):
    from dataclasses import replace

    memory = memory_of(llama)
    path = tmp_path / "m.safetensors"
    save_memory(path, memory, ABOUT)  # it says that a middle memory is there
    with pytest.raises(Refusal, match=r"tensor W\.1"):
        load_memory(path, llama, base="base", tokenizer="tokens")
    memory.weights[LAST][0, 0] = torch.nan
    save_memory(path, memory, replace(ABOUT, places=(LAST,)))
    memory.detach()
    with pytest.raises(Refusal, match="not finite"):
        load_memory(path, llama, base="base", tokenizer="tokens")
