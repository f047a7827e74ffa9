"""runs/engine/, calculator.py and runs/sample.py: loading, cache, slots that come and go, sampling, kernel."""

import codecs
import functools
import json
import math
import re
import sys
from types import SimpleNamespace

import engine
import pytest
import sample as sample_script
import torch
from engine import cache, kernel, prefill, sampling, scheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.calculator import calculate
from lib.command import RunError

from commands import write_run
from test_model import CONFIGS
from tiny import logits, random_documents, random_model, tiny_config, tiny_medium

# ==== loading


@pytest.fixture
def run_dir(bpe, tmp_path):  # noqa: F811
    return write_run(tmp_path / "run", bpe)


def test_another_interface_is_refused(run_dir):
    """One sentence names both interfaces and the commit to check out."""
    path = run_dir / "train_small.py"
    path.write_text(re.sub(r"^INTERFACE = .*$", "INTERFACE = 99", path.read_text(), flags=re.M))
    description = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps({**description, "machine": {"git_commit": "0123abc"}}))
    found = f"has interface 99 but this tool reads {engine.INTERFACE}; "
    with pytest.raises(RunError, match=f"{found}use the tools of the commit that made the run: 0123abc"):
        engine.load_run(run_dir, device="cpu")


def test_what_cannot_be_loaded(run_dir, bpe, tmp_path):  # noqa: F811
    other = write_run(tmp_path / "other", bpe, model=random_model(tiny_config(vocab_size=300)))
    no_device = "--device {} does not work here (.*); omit it"
    for arguments, message in [
        ((tmp_path / "nothing",), "it does not exist"),
        ((run_dir, 3), "no checkpoint at step 3"),
        ((run_dir, None, "gpu"), no_device.format("gpu")),
        ((run_dir, None, "cuda:99"), no_device.format("cuda:99")),
        ((other, None, "cpu"), "other cannot be loaded \\(Error"),
    ]:
        with pytest.raises(RunError, match=message) as error:
            engine.load_run(*arguments)
        assert "\n" not in str(error.value)


def test_tables_of_a_gpu_stay_in_bf16_on_a_cpu(bpe, tmp_path):  # noqa: F811
    """They are most of a model's memory. It computes what it does with the same numbers in fp32, or all in bf16."""
    model, found = random_model(tiny_config(vocab_size=900, dtype="float32")), []
    for dtype in (torch.bfloat16, torch.float32):
        for name in ("bigram_embed", "trigram_embed"):
            setattr(model, name, torch.nn.Parameter(getattr(model, name).detach().to(dtype)))
        folder = write_run(tmp_path / str(dtype), bpe, model=model)
        loaded = engine.load_run(folder, device="cpu").model
        assert loaded.bigram_embed.dtype == loaded.trigram_embed.dtype == dtype and loaded.embed.dtype == torch.float32
        found.append(logits(loaded, random_documents((30,))[0]))
        narrow = engine.load_run(folder, device="cpu", dtype="bfloat16").model
        assert narrow.bigram_embed.dtype == torch.bfloat16
        torch.testing.assert_close(logits(narrow, random_documents((30,))[0]).float(), found[-1], atol=0.5, rtol=0)
    torch.testing.assert_close(*found)


def test_two_runs_in_one_process(bpe, tmp_path):  # noqa: F811
    """Each keeps its module: a class of the first one is still found by its name."""
    scripts = [engine.import_script(write_run(tmp_path / name, bpe)) for name in ("first", "second.run")]
    assert scripts[0].__name__ != scripts[1].__name__ and [sys.modules[s.__name__] for s in scripts] == scripts
    assert {type(script.Config()).__module__ for script in scripts} == {script.__name__ for script in scripts}


# ==== decoding against the forward pass


# module and name, and what is wrong with it; the first argument is the right one
FAULTS = {
    "position": (engine, "decode", lambda decode, *args: decode(*args[:-1], args[-1] + 1)),
    "previous": (engine, "decode", lambda decode, model, cache, tokens, previous, positions: decode(
        model, cache, tokens, torch.stack((tokens, previous[1])), positions)),
    "before": (engine, "decode", lambda decode, model, cache, tokens, previous, positions: decode(
        model, cache, tokens, previous[[0, 0]], positions)),
    "no offset": (kernel, "decode_attention", lambda attention, *args: attention(*args[:-1], False)),
    "offset": (kernel, "decode_attention", lambda attention, *args: attention(*args[:-1], True)),
    "window": (prefill, "ring_indices", lambda indices, kind, *more: indices(
        kind._replace(window=max(kind.window - 1, 1)), *more)),
}  # fmt: skip


def run_of(plain, dtype, device="cpu", tokenizer=None) -> engine.Run:
    """A Run without a folder, with the weights of a model in a dtype."""
    script = sys.modules[type(plain).__module__]
    model = script.GPT(plain.config, device, dtype)
    model.load_state_dict({k: v.to(model.state_dict()[k].dtype) for k, v in plain.state_dict().items()})
    model.attention = script.choose_attention(model, lambda text: None)
    return engine.Run(script, model, tokenizer, plain.config, 0)


@pytest.mark.parametrize(("module", "name", "fault"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("medium", [False, True], ids=("small", "medium"))
def test_wrong_decoding_is_found(dataset, monkeypatch, module, name, fault, dtype, medium):
    """A wrong position, previous token, key offset or window is refused, also where rounding could hide it."""
    config = (tiny_medium if medium else tiny_config)(stages=((1.0, 2, 1.0),), bigram_rows=500, trigram_ratio=2.5)
    run = run_of(random_model(config), dtype, tokenizer=dataset.tokenizer)
    assert sample_script.check(run)["decoding_error"] < sample_script.EXACT_TOLERANCE / 3
    assert sample_script.decoding_error(run.model, run.tokenizer) < sample_script.ROUNDED_TOLERANCE / 3
    monkeypatch.setattr(module, name, functools.partial(fault, getattr(module, name)))
    with pytest.raises(RunError, match="decoding and the forward pass give different logits"):
        sample_script.check(run)


SAMPLINGS = [{"temperature": 0.0}, {}, {"top_k": 0}, {"top_k": 0, "top_p": 0.5}, {"presence_penalty": 1.0}]


@pytest.mark.parametrize("options", SAMPLINGS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_logits_that_are_not_finite_are_never_decoded(generator, monkeypatch, value, options):
    """Models without softcap can compute one. From the first step or the third: a sentence, and the slots are free."""
    broken = engine.Generator(generator.model, generator.tokenizer)
    for last in (1, 3):
        steps = iter(range(last - 1, -1, -1))

        def decode(*inputs, steps=steps):
            logits = engine.decode(*inputs)
            return logits if next(steps, 0) else logits.index_fill(1, torch.tensor([7]), value)

        monkeypatch.setattr(scheduler, "decode", decode)
        with pytest.raises(RunError, match="not finite; choose an earlier checkpoint with --step"):
            broken.generate([[1, 2]], max_tokens=4, **options)
        assert not broken.decoder.running


# ==== runs/sample.py


@pytest.fixture
def run_sample(capsys):
    """run_sample(*args): exit code, stdout and stderr."""
    return lambda *args: (sample_script.main([str(arg) for arg in args]), *capsys.readouterr())


def test_sample_command(run_dir, run_sample):
    """Prompts with their continuations, then one JSON object; the seed decides, a long prompt shortens the answer."""
    flags = (run_dir, "--device", "cpu", "--seed", 3, "--dtype", "float32", "--attention", "sdpa")
    code, out, err = run_sample(*flags, "--prompt", "the rest", "--prompt", "the rest", "--tokens", 9)
    texts, last = out.rstrip("\n").rsplit("\n\n", 1)
    result = json.loads(last)
    assert code == 0 and err == "" and set(result) == {"new_tokens", "seconds", "run_dir"}
    run = engine.load_run(run_dir, device="cpu")
    generator = engine.Generator(run.model, run.tokenizer)
    options = {"max_tokens": 9, "temperature": 0.8, "top_k": 50}
    ids = [run.tokenizer.bos_id, *run.tokenizer.encode("the rest")]
    (one,), (two,) = (generator.generate([ids], seed=3 + i * engine.SEED_STRIDE, **options) for i in range(2))
    assert one != two and texts == f"the rest{run.tokenizer.decode(one)}\n\nthe rest{run.tokenizer.decode(two)}"
    assert result["new_tokens"] == len(one) + len(two)
    prompt = "q" * 60
    room = 64 - len(run.tokenizer.encode(prompt))
    assert 0 < room < 9
    code, out, _ = run_sample(*flags, "--prompt", prompt, "--temperature", 0)
    assert code == 0 and json.loads(out.splitlines()[-1])["new_tokens"] <= room
    code, _, err = run_sample(run_dir, "--step", 1)
    assert code == 1 and err.startswith("error: ") and "no checkpoint" in err and err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--tokens=0", "--temperature=-1", "--temperature=nan", "--top-k=-1",
                                  "--top-p=0", "--top-p=1.1"])  # fmt: skip
def test_sample_flags(flag):
    with pytest.raises(SystemExit):
        sample_script.parse(["run", flag])


# ==== the cache


def feed(model, cache, sequences, done, counts) -> torch.Tensor:
    """Appends the next counts[slot] tokens of each sequence (0: the slot is idle). Returns the last logits (B, V)."""
    ends = [d + n for d, n in zip(done, counts, strict=True)]
    slots = [slot for slot, n in enumerate(counts) if n > 1]
    with torch.no_grad():
        if slots:  # all but the last token
            beginnings = [sequences[slot][: ends[slot] - 1] for slot in slots]
            prefill.prefill(model, cache, slots, [done[slot] for slot in slots], beginnings)
        steps = [(*[7, 7, *ids[:end]][:-4:-1], end - 1 if n else -1)
                 for ids, end, n in zip(sequences, ends, counts, strict=True)]  # fmt: skip
        tokens, *previous, positions = torch.tensor(steps).unbind(1)
        done[:] = ends
        return engine.decode(model, cache, tokens, torch.stack(previous), positions.int())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_cached_decoding_equals_full_forward(config):
    """Prefill in one or several ragged chunks, then token by token beyond the windows: the full forward's logits.

    Rings hold 10 and 18 keys, so chunks of up to 40 and sequences of 64 tokens go round several times.
    """
    model = random_model(config)
    sequences = random_documents((64, 58, 61))
    full = [logits(model, ids) for ids in sequences]
    for chunks in ([(5, 40, 23)], [(1, 17, 2), (3, 0, 20), (1, 22, 1), (30, 1, 9)], [(2, 1, 3), (12, 30, 11)]):
        done, cache = [0, 0, 0], engine.KVCache.empty(model, 3, 64)
        for counts in (*chunks, *[(1, 1, 1)] * 4, (0, 1, 0), *[(1, 1, 1)] * 8):
            cached = feed(model, cache, sequences, done, counts)
            for slot in range(3):
                if counts[slot]:
                    error = (cached[slot] - full[slot][done[slot] - 1]).abs().max()
                    assert error < 1e-4, f"slot {slot} after {done[slot]} tokens: {error}"


# ==== generation


@pytest.fixture(scope="module")
def generator(dataset):
    return engine.Generator(random_model(tiny_config()), dataset.tokenizer)


def argmax_loop(generator, prompt, max_tokens):
    """Reference: the whole text through the full forward for every new token."""
    ids = list(prompt)
    for _ in range(max_tokens):
        token = logits(generator.model, ids)[-1, : generator.tokenizer.vocab_size].argmax().item()
        if token == generator.tokenizer.bos_id:
            break
        ids.append(token)
    return ids[len(prompt) :]


def decoder_of(generator, num_slots, length=64, **options) -> engine.Decoder:
    return engine.Decoder(generator.model, generator.tokenizer, num_slots, length, **options)


def greedy(prompt, max_tokens) -> engine.Completion:
    return engine.Completion(prompt, max_tokens, temperature=0.0)


def run_out(decoder, completions=()) -> dict[int, int]:
    """Adds completions by slot, and makes steps until all slots are idle. Returns what add_requests does."""
    reused = decoder.add_requests(completions) if completions else {}
    while decoder.running:
        decoder.step()
    return reused


PROMPTS = random_documents((3, 20, 9, 1), vocab=290)


@pytest.mark.parametrize(("slots", "pack"), [(128, 16384), (3, 12), (1, 16384)])
def test_greedy_batch_equals_uncached_loop(generator, slots, pack, monkeypatch):
    """Prompts of different lengths, all at once or as slots get free, give what each gives alone without a cache.

    So they do with a limit on the tokens computed at once.
    """
    monkeypatch.setattr(scheduler, "MAX_PREFILL_TOKENS", pack)
    options = {"max_tokens": 40, "temperature": 0.0}
    together = engine.Generator(generator.model, generator.tokenizer, slots).generate(PROMPTS, **options)
    assert together == [argmax_loop(generator, prompt, 40) for prompt in PROMPTS]
    assert together == [generator.generate([prompt], **options)[0] for prompt in PROMPTS]
    assert max(map(len, together)) == 40, "the windows are 8 and 16"
    assert generator.generate([], **options) == []


def completed(generator, prompts, **options) -> list[engine.Completion]:
    completions = [engine.Completion(prompt, **options) for prompt in prompts]
    generator.complete(completions)
    return completions


def test_stop_tokens_and_bos_end_a_row(generator):
    """A row ends before its first stop token, the others go on; a sampled BOS always ends it."""
    plain = generator.generate(PROMPTS, max_tokens=12, temperature=0.0)
    stop = plain[1][3]
    stopped = completed(generator, PROMPTS, max_tokens=12, temperature=0.0, stop=(stop,))
    assert [c.tokens for c in stopped] == [row[: row.index(stop)] if stop in row else row for row in plain]
    assert [c.reason for c in stopped] == ["stop" if stop in row else "length" for row in plain]
    assert [c.stop_token for c in stopped] == [stop if stop in row else -1 for row in plain]
    assert [c.forced for c in stopped] == [[False] * len(c.tokens) for c in stopped]
    steps = list(generator.run([engine.Completion(PROMPTS[1], 12, temperature=0.0, stop=(stop,))]))
    assert len(steps) == len(stopped[1].tokens) + 1 <= 4, "nothing is computed after the end"
    bos = generator.tokenizer.bos_id
    tokenizer = SimpleNamespace(bos_id=stop, vocab_size=300, specials={})
    other = engine.Generator(generator.model, tokenizer).generate(PROMPTS[1:2], max_tokens=12, temperature=0.0)
    assert other == [stopped[1].tokens]
    assert all(bos not in row for row in generator.generate(PROMPTS, max_tokens=40, temperature=5.0, top_k=0))


def test_padding_of_the_vocabulary_is_never_sampled(generator):
    """Ids beyond the tokenizer's do not appear, however likely the model finds them."""
    model = random_model(tiny_config())
    with torch.no_grad():
        model.head[300:] = 50 * model.head[:20]
    for options in ({"temperature": 0.0}, {"temperature": 3.0, "top_k": 0}, {"temperature": 3.0, "top_k": 5}):
        rows = engine.Generator(model, generator.tokenizer).generate(PROMPTS, max_tokens=30, **options)
        assert max(max(row) for row in rows if row) < 300


# ==== slots that come and go


def test_slots_come_and_go(generator):
    """Requests join while others decode, one is dropped, its slot is taken again: each is as if it were alone.

    So it is where the slot holds keys that are no numbers, as an overflow leaves them.
    """
    decoder = decoder_of(generator, 3, 60)
    a, b, c, d, e = (greedy(ids, 25) for ids in random_documents((21, 9, 30, 1, 14), 290))
    decoder.add_requests({0: a, 2: b})
    for _ in range(4):
        assert [slot for slot, *_ in decoder.step()] == [0, 2]
    decoder.add_requests({1: c})
    decoder.step()
    decoder.evict(2)  # the client of b left
    for ring in decoder.cache.rings():
        ring[2] = float("nan")
    decoder.step()
    run_out(decoder, {2: d})
    run_out(decoder, {0: e})
    for done in (a, c, d, e):
        assert done.tokens == argmax_loop(generator, done.prompt, 25) and done.reason == "length"
    assert b.tokens == argmax_loop(generator, b.prompt, 5) and b.reason == ""


def test_a_stream_left_early_frees_its_slots(generator):
    """The next call starts from nothing."""
    stream = generator.run([greedy(PROMPTS[2], 20)])
    next(stream)
    other = generator.generate(PROMPTS[:1], max_tokens=3, temperature=0.0)  # meanwhile, with slots of its own
    stream.close()
    assert not generator.decoder.running and not any(generator.decoder.prefix_cache.tokens)
    assert other == [argmax_loop(generator, PROMPTS[0], 3)]
    assert generator.generate(PROMPTS, max_tokens=4, temperature=0.0) == [argmax_loop(generator, p, 4) for p in PROMPTS]


def test_changed_weights_are_used(generator):
    """A generator that outlives an update of the model continues with the new weights."""
    model = random_model(tiny_config())
    mine = engine.Generator(model, generator.tokenizer)
    before, decoder = mine.generate(PROMPTS, max_tokens=10, temperature=0.0), mine.decoder
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.3)
    after = mine.generate(PROMPTS, max_tokens=10, temperature=0.0)
    assert mine.decoder is decoder and before != after == [argmax_loop(mine, prompt, 10) for prompt in PROMPTS]


def test_one_graph_of_a_step(generator, monkeypatch):
    """decode and sample compile without a break, write the cache in place, and give the same tokens, greedy or not."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    decoder = decoder_of(generator, 4, compile=True)
    options = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}] * 2
    found = [engine.Completion(prompt, 8, **option) for prompt, option in zip(PROMPTS, options, strict=True)]
    run_out(decoder, dict(enumerate(found)))
    for completion, prompt, option in zip(found, PROMPTS, options, strict=True):
        assert [completion.tokens] == generator.generate([prompt], max_tokens=8, **option)


# ==== sampling


LOGITS = [0.3, 2.0, -1.0, 1.2, 0.9, -30.0]


@pytest.mark.parametrize(("options", "kept"), [
    ({}, {0, 1, 2, 3, 4}), ({"temperature": 0.5}, {0, 1, 2, 3, 4}), ({"temperature": 2.0}, {0, 1, 2, 3, 4}),
    ({"top_k": 3}, {1, 3, 4}), ({"top_k": 1}, {1}), ({"top_k": 50}, {0, 1, 2, 3, 4}),
    ({"top_p": 0.5}, {1, 3}),  # 0.49 does not reach a half, with 0.22 it does
    ({"top_p": 0.45}, {1}), ({"top_p": 1e-9}, {1}),
    ({"top_k": 3, "top_p": 0.8}, {1, 3}),  # of the three best: 0.57, 0.83
    ({"top_p": 0.8, "temperature": 2.0}, {0, 1, 3, 4}),  # flatter: 0.34, 0.57, 0.76, 0.90
])  # fmt: skip
def test_sampling_has_the_exact_distribution(options, kept):
    """Only the kept entries appear, as often as softmax(logits / temperature) over them says (chi square)."""
    rows = torch.tensor(LOGITS).repeat(20000, 1)
    cuts = {"temperature": 1.0, "top_k": 0, "top_p": 2.0, **options}.values()
    columns = [torch.full((20000,), value) for value in cuts]
    sampled = sampling.sample_ids(rows, *columns, torch.arange(20000), torch.tensor(7), len(LOGITS))
    counts, kept = torch.bincount(sampled, minlength=len(LOGITS)).double(), sorted(kept)
    scaled = torch.tensor(LOGITS, dtype=torch.float64) / options.get("temperature", 1.0)
    expected = scaled[kept].softmax(0) * 20000
    assert counts.sum() == counts[kept].sum() == 20000
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 20  # 4 degrees of freedom: p = 0.0005


def test_noise_is_uniform_over_the_ids():
    """Equal logits: all 1,024 ids are as likely (chi square), for seeds that count up and for steps that do."""
    flat, zeros, count = torch.zeros(8192, 1024), torch.zeros(8192, dtype=torch.long), torch.arange(8192)
    for seeds, counters in ((count, zeros + 5), (zeros + 5, count), (count * 0x9E3779B1 % 2**32, zeros)):
        sampled = sampling.sample_ids(flat, torch.ones(8192), zeros, zeros + 2.0, seeds, counters, 0)
        assert 840 < ((torch.bincount(sampled, minlength=1024) - 8) ** 2 / 8).sum() < 1210  # 1,023 of freedom, sigma 45


# ==== the calculator


@pytest.mark.parametrize(("expression", "result"), [
    ("2+3*4", "14"), (" (2 + 3) * 4 ", "20"), ("48/2", "24"), ("1/4", "0.25"), ("1/3", "0.333333333333"),
    ("0.1*3", "0.3"), ("7//2", "3"), ("-7//2", "-4"), ("7%3", "1"), ("2**10", "1024"), ("2**-1", "0.5"),
    ("1,000*2", "2000"), ("1,234,567+.5", "1234567.5"), ("--5", "5"), ("+30+46", "76"), ("3*+6", "18"),
    ("1e3", "1000"), ("1e20/3", "3.33333333333e+19"), ("10**15", "1000000000000000"), ("5.0", "5"), ("-0.0", "0"),
    ("'strawberry'.count('r')", "3"), ("\"it's\".count(\"'\")", "1"), ("'1,000'.count(',')+1", "2"),
    ("'abc'.count('')", "4"), ("9*'a'.count('a')", "9"),
    ("1" + "+1" * 100, "101"), ("1.5**100", "4.06561177535e+17"), (f"'{'a' * 243}'.count('a')", "243"),
])  # fmt: skip
def test_calculator(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize("expression", [
    "", "x", "abs(1)", "__import__('os')", "[1]", "(1,2)", "lambda:1", "1 if 1 else 2", "1==1", "~1", "1@2", "1j",
    "'a'", "'a'*9", "'a'+'b'", "'a'.upper()", "'a'.count", "'a'.count('a','b')", "'a'.count(1)", "(1).count('a')",
    "f'a'.count('a')", "b'a'.count(b'a')", "'a\\x'.count('a')", "1,00", "1_000", "0x10", "007", "True", "1+", "1 2",
    "1/0", "0**-1", "(-8)**0.5", "9**9**9", "10**400", "2.0**2000", "1e400", "9" * 31, "1\n+1", "\ud800",
    "-" * 120 + "1", "(" * 300, "1" + "+1" * 101, "1.5**101", f"'{'a' * 244}'.count('a')",
])  # fmt: skip
def test_calculator_refuses(expression):
    assert calculate(expression) is None


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.one_of(st.text(max_size=300), st.text("0123456789.,+-*/%() e'\"countab", max_size=60)))
def test_calculator_never_raises(text):
    """Whatever a model writes, the answer is short or None."""
    result = calculate(text)
    assert result is None or 0 < len(result) <= 31


# ==== overlapping steps, prefill buckets, prefix cache


@pytest.mark.parametrize("kind", ["overlap", "stops", "overlap and stops", "graphs"])
def test_other_ways_give_the_same_tokens(generator, monkeypatch, kind):
    """Stop tokens, lengths, tool calls, shared prefixes and requests that join late: as the plain way has them.

    So it is where slots are stopped and continue later, elsewhere. Padded prefills compute as little. A graph computes
    its work at once here.
    """
    monkeypatch.setattr(scheduler.Graphs, "run", lambda graphs, key, work, *arguments: work(*arguments))
    monkeypatch.setattr(prefill, "NEW_BUCKETS", (16, 64))
    monkeypatch.setattr(prefill, "OLD_BUCKETS", (0, 32))
    monkeypatch.setattr(cache, "MIN_SHARED_PREFIX", 16)
    shared, *ends = random_documents((30, 1, 5, 9, 2), vocab=290)
    prompts = [*PROMPTS, *([*shared[:n], *end] for n, end in zip((30, 30, 30, 20), ends, strict=True))]
    special = [generator.tokenizer.specials[f"<|python_{name}|>"] for name in ("start", "end")]
    call = {special[0]: 300.0, ord("3"): 200.0, special[1]: 100.0}  # one after the other
    options = [{"temperature": 0.0}, {"temperature": 1.3}, {"logprobs": 2, "prompt_logprobs": True},
               {"temperature": 0.0, "logit_bias": call, "frequency_penalty": 250.0}]  # fmt: skip

    def talk(decoder, stops=False) -> tuple:
        every = [engine.Completion(prompt, 3 + 4 * i % 13, stop=(5, 17, *range(100, 130)), seed=i, tools=True,
                                   **options[i % 4]) for i, prompt in enumerate(prompts * 3)]  # fmt: skip
        waiting, reused = every[::-1], []
        while waiting or decoder.running:
            idle = [slot for slot in range(3) if slot not in decoder.running]
            if idle and waiting:
                reused.append(decoder.add_requests({slot: waiting.pop() for slot in idle[: len(waiting)]}))
            decoder.step()
            if stops and len(decoder.running) == 2:  # the first slot makes room
                slot, completion = min(decoder.running.items())
                decoder.release([slot])
                waiting.insert(0, completion)
        logprobs = [c.logprob for one in every for c in (*one.prompt_token_logprobs[1:], *one.token_logprobs)]
        return [(c.tokens, c.forced, c.reason) for c in every], logprobs, reused

    plain, other = (decoder_of(generator, 3, prefix_slots=2) for _ in range(2))
    other.overlap = "overlap" in kind
    other.prefill_graphs = scheduler.Graphs() if kind == "graphs" else None
    (expected, logprobs, reused), (found, other_logprobs, other_reused) = talk(plain), talk(other, "stops" in kind)
    assert found == expected and other_logprobs == pytest.approx(logprobs, abs=1e-5)
    assert {reason for *_, reason in found} == {"stop", "length"} and any(any(forced) for _, forced, _ in found)
    if kind == "graphs":
        assert other_reused == reused and {bucket.old for bucket in other.graph_inputs} == {0, 32}
    for slot in range(3):  # what they hold continues as if it were computed anew
        cached = other.prefix_cache.tokens[slot]
        done = greedy([*cached, 7], 5)
        assert run_out(other, {slot: done}) == {slot: len(cached)}
        assert done.tokens == argmax_loop(generator, [*cached, 7], 5)


def test_shared_prefixes(generator, monkeypatch):
    """A third sequence starts with a copy, three in one batch share, and the least recently used prefix makes room.

    Tokens computed in the same batch do not count as cached.
    """
    monkeypatch.setattr(cache, "MIN_SHARED_PREFIX", 16)
    decoder = decoder_of(generator, 3, prefix_slots=1)
    computed = []

    def prefill(plans, prefill=decoder.prefill_batch):
        computed.append(sum(len(plan.ids) - plan.num_cached for plan in plans))
        return prefill(plans)

    monkeypatch.setattr(decoder, "prefill_batch", prefill)
    first, second, third = ([1, *ids] for ids in random_documents((40, 40, 40), vocab=290, seed=5))

    def ask(prompts) -> list[int]:
        """How many ids of each prompt were cached."""
        completions = {slot: greedy(prompt, 4) for slot, prompt in prompts.items()}
        reused = run_out(decoder, completions)
        assert all(c.tokens == argmax_loop(generator, c.prompt, 4) for c in completions.values())
        return [*reused.values()]

    assert [ask({slot: [*first, slot]}) for slot in range(3)] == [[0], [0], [41]]
    assert [ask({slot: [*second, 5 + i]}) for i, slot in enumerate((0, 1, 0))] == [[0], [0], [41]]
    assert ask({2: [*first[:30], 9]}) == [0] and decoder.prefix_cache.tokens[3] == first[:30], "as slot 2 had it"
    assert ask({0: [*first[:30], 4], 1: [*second, 8]}) == [30, 0], "the shared slot is in use"
    assert ask({slot: [*first[:35], slot] for slot in range(3)}) == [30, 30, 30]
    computed.clear()
    assert ask({slot: [*third, slot] for slot in range(3)}) == [0, 0, 0] and sum(computed) == 2 * len(third)


# ==== tool calls


def scripted(monkeypatch, generator, plan, prompts, **options) -> list[engine.Completion]:
    """Sampled tokens come from plan[row][i] in the i-th step of the batch, then from the model (argmax)."""
    steps = iter(range(10**6))

    def planned(logits_BV, *options):
        i = next(steps)
        ids = [row[i] if i < len(row) else z.argmax().item() for row, z in zip(plan, logits_BV, strict=True)]
        return torch.tensor(ids)

    monkeypatch.setattr(scheduler, "sample_ids", planned)
    return completed(engine.Generator(generator.model, generator.tokenizer), prompts, **options)


def test_tool_calls(generator, monkeypatch):
    """The result is forced behind a call and marked, mates go on, and the model goes on from it as from any text."""
    tok = generator.tokenizer
    start, end, output, output_end = (tok.specials[f"<|{name}|>"] for name in (
        "python_start", "python_end", "output_start", "output_end"))  # fmt: skip
    call, result = [*tok.encode("a"), start, *tok.encode("3*4"), end], [output, *tok.encode("12"), output_end]
    wasted, again = [7] * len(result), [*tok.encode(" so"), start, *tok.encode("x"), end, 9, start, start,
                                        *tok.encode("2"), end]  # fmt: skip
    plan = [[*call, *wasted, *again, 7, 7, 7], []]
    expected = [*call, *result, *again, output, *tok.encode("2"), output_end]
    tail = argmax_loop(generator, [*PROMPTS[1], *expected], 40 - len(expected))
    mate = argmax_loop(generator, PROMPTS[2], 40)
    assert tail, "the model says something after the result"
    done, other = scripted(monkeypatch, generator, plan, PROMPTS[1:3], max_tokens=40, tools=True)
    assert done.tokens == [*expected, *tail] and other.tokens == mate and not any(other.forced)
    n, plan, prompts = len(call), plan[:1], PROMPTS[1:2]
    marks = [False] * n + [True] * len(result) + [False] * len(again) + [True] * 3 + [False] * len(tail)
    assert done.forced == marks
    (cut,) = scripted(monkeypatch, generator, plan, prompts, max_tokens=n + 2, tools=True)
    assert cut.tokens == expected[: n + 2] and cut.reason == "length" and cut.forced == marks[: n + 2]
    (plain,) = scripted(monkeypatch, generator, plan, prompts, max_tokens=n + 3)
    assert plain.tokens == [*call, 7, 7, 7] and not any(plain.forced)


# ==== text


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 290), max_size=20))
def test_streamed_text_is_the_decoded_text(generator, ids):
    """Also for bytes that are no text, and for tokens that hold parts of characters."""
    mine = engine.Generator(generator.model, generator.tokenizer)
    mine.run = lambda completions: ([engine.StepOutput(0, token, "")] for token in ids)
    expected = codecs.decode(generator.tokenizer.decode_bytes(ids), "utf-8", "replace")
    assert "".join(mine.stream_text("x")) == generator.tokenizer.decode(ids) == expected


def test_context_overflow(generator):
    """A prompt of 60 leaves room for 5 of 64 (the newest token needs no place); one of 65 is an error."""
    (prompt,) = random_documents((60,), vocab=290)
    (completion,) = completed(generator, [prompt], max_tokens=6, temperature=0.0)
    assert completion.tokens == argmax_loop(generator, prompt, 5) and completion.reason == "length"
    with pytest.raises(RunError, match="max_tokens is 0; ask for at least 1"):
        generator.generate([[1]], max_tokens=0)
    with pytest.raises(RunError, match="a prompt of 65 tokens exceeds the context of 64; shorten it"):
        generator.generate([[1] * 65], max_tokens=1)


# ==== on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_graphs_of_steps_give_the_tokens_of_plain_steps(generator, dtype):
    """Rows come late, one is taken again, and sampling goes through graphs of several widths."""
    plain = random_model(tiny_config(width=256, head_dim=64, mlp_width=512, vocab_size=300))
    model = run_of(plain, dtype, "cuda", generator.tokenizer).model
    samplings = [{}, {"temperature": 0.0}, {"top_k": 0}, {"top_p": 0.9, "top_k": 0}, {"presence_penalty": 1.0}]

    def answers(graph) -> list[list[int]]:
        decoder = engine.Decoder(model, generator.tokenizer, 4, 64)
        decoder.prefill_graphs = None  # a padded prefill rounds otherwise
        decoder.step_graphs = decoder.step_graphs if graph else None
        completions = []
        for seed, options in enumerate(samplings):
            prompt = random_documents((3 + 5 * seed,), vocab=290)[0]
            completions.append(engine.Completion(prompt, 30, seed=seed, logprobs=3 if seed == 1 else None, **options))
            decoder.evict(seed % 4)
            decoder.add_requests({seed % 4: completions[-1]})
            for _ in range(8):
                decoder.step()
        run_out(decoder)
        assert not graph or len(decoder.step_graphs.recorded) >= 4
        return [completion.tokens for completion in completions]

    assert answers(True) == answers(False)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_generator_on_a_gpu(generator, compile, monkeypatch):
    """fp32 on the GPU gives the CPU's greedy tokens, with slots that are taken again, twice."""
    monkeypatch.setattr(scheduler, "Decoder", functools.partial(engine.Decoder, compile=compile))
    model = random_model(tiny_config()).cuda()
    mine = engine.Generator(model, generator.tokenizer, num_slots=2)
    for _ in range(2):
        answers = mine.generate(PROMPTS, max_tokens=20, temperature=0.0)
        assert answers == [argmax_loop(generator, prompt, 20) for prompt in PROMPTS]
    for cut in ({}, {"top_k": 0}, {"top_k": 0, "top_p": 0.8}):
        options = {"max_tokens": 10, "temperature": 1.0, "seed": 3, **cut}
        assert mine.generate(PROMPTS, **options) == generator.generate(PROMPTS, **options)


# ==== the kernel

COMPILED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
DEVICES = [pytest.param("cpu", id="interpreter", marks=COMPILED),
           pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("size", [2, 21, 37])
def test_decode_attention(size, offset, device, monkeypatch):
    """Several steps from idle, empty, half-full and wrapped rings; what lies in unseen cells does not matter."""
    cuda = device == "cuda"
    torch.manual_seed(0)
    scale, D, dtype = (29, 128, torch.bfloat16) if cuda else (1, 16, torch.float32)
    if not cuda:
        monkeypatch.setattr(kernel, "DECODE_TILES", dict(BN=16))
        monkeypatch.setattr(kernel, "use_triton", lambda x: True)
    size, H = size * scale, 2
    positions = torch.tensor([-1, 0, size // 2, size - 2, size - 1, size, 5 * size + 1], device=device).int()
    behind = (positions[:, None] - torch.arange(size, device=device)) % size
    unseen = ((behind > positions[:, None]) | (behind == size - 1))[:, :, None, None]
    shared = 2  # slots behind those that have a query, which nobody may touch
    unseen = torch.cat((unseen, unseen.new_zeros(shared, size, 1, 1)))
    rings = torch.randn(2, len(unseen), size, H, D, device=device).to(dtype)
    mine, theirs = rings.masked_fill(unseen, float("nan")), rings.masked_fill(unseen, 0)
    for _ in range(2):
        q, k, v = torch.randn(len(positions), 3, H, D, device=device).to(dtype).unbind(1)
        got = kernel.decode_attention(q * D**-0.5, k, v, *mine, positions, offset)
        want = kernel.decode_attention_ref(q * D**-0.5, k, v, *theirs, positions, offset)
        error = (got - want)[1:].float().norm() / want[1:].float().norm()
        assert error < (1e-2 if cuda else 1e-5)  # not so for NaN
        assert torch.equal(torch.where(mine.isnan(), theirs, mine), theirs), "both wrote the same"
        assert mine[:, 0].isnan().all() and theirs[:, 0].eq(0).all() and got[0].isfinite().all(), "an idle slot"
        assert torch.equal(mine[:, -shared:], rings[:, -shared:]), "a slot of a shared prefix"
        positions = torch.where(positions < 0, positions, positions + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("medium", [False, True], ids=("small", "medium"))
def test_check_on_a_gpu(dataset, dtype, attention, medium):
    """Random models pass the check with every kernel that a real one uses."""
    sizes = {"width": 256, "head_dim": 64, "mlp_width": 512, "stages": ((1.0, 2, 1.0),)}
    config = (tiny_medium if medium else tiny_config)(**sizes, attention=attention)
    run = run_of(random_model(config), dtype, "cuda", dataset.tokenizer)
    sample_script.check(run)
    assert sample_script.decoding_error(run.model, run.tokenizer) < (1e-3 if dtype == torch.float32 else 5e-2)
