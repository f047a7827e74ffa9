"""Generation: the cache, rows that come and go, sampling, tools, and text that never breaks inside a character."""

import codecs
import concurrent.futures
import functools
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
import train_small as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import logits, random_documents, random_model, tiny_config


@pytest.fixture(scope="module")
def generator(dataset):
    return ts.Generator(random_model(tiny_config()), dataset.tokenizer)


def argmax_loop(generator, prompt, max_tokens, stop=()):
    """Reference: the whole text through the full forward for every new token."""
    ids, new = list(prompt), []
    for _ in range(max_tokens):
        token = logits(generator.model, ids)[-1, : generator.tokenizer.vocab_size].argmax().item()
        if token in (*stop, generator.tokenizer.bos_id):
            break
        ids, new = [*ids, token], [*new, token]
    return new


PROMPTS = random_documents((3, 20, 9, 1), vocab=290)


@pytest.mark.parametrize("rows", (128, 3, 1))
def test_greedy_batch_equals_uncached_loop(generator, rows):
    """Prompts of different lengths, all at once or as rows get free, give what each gives alone without a cache."""
    options = {"max_tokens": 40, "temperature": 0.0}
    together = ts.Generator(generator.model, generator.tokenizer, rows).generate(PROMPTS, **options)
    assert together == [argmax_loop(generator, prompt, 40) for prompt in PROMPTS]
    assert together == [generator.generate([prompt], **options)[0] for prompt in PROMPTS]
    assert max(map(len, together)) == 40, "the windows are 8 and 16"
    assert generator.generate([], **options) == []


def test_prompts_are_prefilled_in_packs(generator, monkeypatch):
    """A limit on the tokens computed at once changes nothing; a prompt above it is a pack of its own."""
    packs, model = [], generator.model
    prefill = model.prefill
    monkeypatch.setattr(model, "prefill", lambda *args: (packs.append(args[1]), prefill(*args))[1])
    monkeypatch.setattr(ts, "PREFILL_TOKENS", 12)
    answers = generator.generate(PROMPTS, max_tokens=5, temperature=0.0)
    assert answers == [argmax_loop(generator, prompt, 5) for prompt in PROMPTS] and packs == [[0], [1], [2]]


def test_stop_tokens_and_bos_end_a_row(generator):
    """A row ends before its first stop token, the others go on; a sampled BOS always ends it."""
    plain = generator.generate(PROMPTS, max_tokens=12, temperature=0.0)
    stop = plain[1][3]
    stopped = generator.complete(PROMPTS, max_tokens=12, temperature=0.0, stop=(stop,))
    assert [c.tokens for c in stopped] == [row[: row.index(stop)] if stop in row else row for row in plain]
    assert [c.reason for c in stopped] == ["stop" if stop in row else "length" for row in plain]
    assert [c.ended for c in stopped] == [stop if stop in row else -1 for row in plain]
    assert [c.forced for c in stopped] == [[False] * len(c.tokens) for c in stopped]
    steps = list(generator.stream(PROMPTS[1:2], max_tokens=12, temperature=0.0, stop=(stop,)))
    assert steps[-1] == [None] and len(steps) == len(stopped[1].tokens) + 1 <= 4, "nothing is computed after the end"
    bos = generator.tokenizer.bos_id
    tokenizer = SimpleNamespace(bos_id=stop, vocab_size=300, specials={})
    other = ts.Generator(generator.model, tokenizer).generate(PROMPTS[1:2], max_tokens=12, temperature=0.0)
    assert other == [stopped[1].tokens]
    assert all(bos not in row for row in generator.generate(PROMPTS, max_tokens=40, temperature=5.0, top_k=0))


def test_padding_of_the_vocabulary_is_never_sampled(generator):
    """Ids beyond the tokenizer's do not appear, however likely the model finds them."""
    model = random_model(tiny_config())
    with torch.no_grad():
        model.head[300:] = 50 * model.head[:20]
    for options in ({"temperature": 0.0}, {"temperature": 3.0, "top_k": 0}, {"temperature": 3.0, "top_k": 5}):
        rows = ts.Generator(model, generator.tokenizer).generate(PROMPTS, max_tokens=30, **options)
        assert max(max(row) for row in rows if row) < 300


# ---- rows that come and go


def run_out(decoder) -> None:
    while decoder.live:
        decoder.step()


def test_rows_come_and_go(generator):
    """Texts enter while others decode, one is dropped, its row is taken again: each is as if it were alone."""
    decoder, texts = ts.Decoder(generator.model, generator.tokenizer, 3, 60), random_documents((20, 9, 30, 1, 14), 290)
    a, b, c, d, e = (ts.Completion(text, 25, temperature=0.0) for text in texts)
    decoder.admit({0: a, 2: b})
    for _ in range(4):
        assert [row for row, *_ in decoder.step()] == [0, 2]
    decoder.admit({1: c})
    decoder.step()
    decoder.free(2)  # the client of b left
    assert len(b.tokens) == 5 and b.reason == "" and 2 not in decoder.live
    decoder.step()
    decoder.admit({2: d})
    events = []
    while 0 in decoder.live:
        events += decoder.step()
    assert [x for x in events if x[0] == 0][-1] == (0, a.tokens[-1], "length")
    decoder.admit({0: e})
    run_out(decoder)
    assert decoder.step() == []
    for done in (a, c, d, e):
        assert done.tokens == argmax_loop(generator, done.prompt, 25) and done.reason == "length"
    assert b.tokens == argmax_loop(generator, b.prompt, 5)


def test_nothing_is_left_for_the_next_text(generator):
    """Keys that are not numbers, as an overflow leaves them, do no harm to the next text in the row."""
    decoder = ts.Decoder(generator.model, generator.tokenizer, 2)
    first, second = (ts.Completion(text, 20, temperature=0.0) for text in random_documents((40, 4), 290))
    decoder.admit({1: first})
    run_out(decoder)
    for ring in (*decoder.cache.keys, *decoder.cache.values):
        ring[1] = float("nan")
    decoder.admit({1: second})
    run_out(decoder)
    assert second.tokens == argmax_loop(generator, second.prompt, 20)


def test_turns_compute_only_what_is_new(generator, monkeypatch):
    """A prompt that begins with what its row holds continues it, however often the rings went round."""
    model, fed = generator.model, []
    prefill, decoder = model.prefill, ts.Decoder(model, generator.tokenizer, 2)
    monkeypatch.setattr(model, "prefill", lambda *args: (fed.append(len(args[3][0]) - args[2][0]), prefill(*args))[1])
    text = PROMPTS[2]
    for turn, news in enumerate(random_documents((2, 5, 20, 1), 290)):
        text, held = [*text, *news], len(decoder.known[1])
        fed.clear()
        answer = argmax_loop(generator, text, 5)
        stop = (answer[3],) if turn == 1 else ()  # the token that stops it has not entered the cache, nor the last one
        completion = ts.Completion(text, 5, temperature=0.0, stop=stop)
        decoder.admit({1: completion})
        run_out(decoder)
        assert completion.tokens == (answer[: answer.index(*stop)] if stop else answer)
        assert sum(fed) == len(text) - 1 - held and (held > 8 or turn == 0)
        text = [*text, *completion.tokens]
        assert decoder.known[1] == (text if stop else text[:-1])
    for other in ([*text[:30], 5, 6], text[:30], text[1:]):  # begins otherwise, or earlier than the rings reach
        fed.clear()
        completion = ts.Completion(other, 5, temperature=0.0)
        decoder.admit({1: completion})
        run_out(decoder)
        assert completion.tokens == argmax_loop(generator, other, 5) and sum(fed) == len(other) - 1
    decoder.free(1)
    assert decoder.known[1] == []


def test_a_stream_left_early_frees_its_rows(generator):
    """The next call starts from nothing."""
    stream = generator.stream(PROMPTS, max_tokens=20, temperature=0.0)
    next(stream)
    other = generator.generate(PROMPTS[:1], max_tokens=3, temperature=0.0)  # meanwhile, with rows of its own
    stream.close()
    assert not generator.decoder.live and not any(generator.decoder.known)
    assert other == [argmax_loop(generator, PROMPTS[0], 3)]
    assert generator.generate(PROMPTS, max_tokens=4, temperature=0.0) == [argmax_loop(generator, p, 4) for p in PROMPTS]


def test_changed_weights_are_used(generator):
    """A generator that outlives an update of the model continues with the new weights."""
    model = random_model(tiny_config())
    mine = ts.Generator(model, generator.tokenizer)
    before, rows = mine.generate(PROMPTS, max_tokens=10, temperature=0.0), mine.decoder
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.3)
    after = mine.generate(PROMPTS, max_tokens=10, temperature=0.0)
    assert mine.decoder is rows and before != after == [argmax_loop(mine, prompt, 10) for prompt in PROMPTS]


def test_one_graph_of_a_step(generator, monkeypatch):
    """decode and sample compile without a break, write the cache in place, and give the same tokens."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    mine = ts.Generator(generator.model, generator.tokenizer, compile=True)
    for options in ({"temperature": 0.0}, {"temperature": 1.0}):
        assert mine.generate(PROMPTS, max_tokens=8, **options) == generator.generate(PROMPTS, max_tokens=8, **options)


# ---- sampling


def frequencies(values, draws=20000, width=None, **options):
    """Counts over many equal rows of different seeds."""
    row, V = torch.tensor(values, dtype=torch.float32), len(values)
    options = {"temperature": 1.0, "top_k": 0, "top_p": 2.0, **options}
    columns = [torch.full((draws,), value) for value in options.values()]
    width = V if width is None else width
    drawn = ts.sample(row.repeat(draws, 1), *columns, torch.arange(draws), torch.tensor(7), width)
    return torch.bincount(drawn, minlength=V).double()


LOGITS = [0.3, 2.0, -1.0, 1.2, 0.9, -30.0]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"temperature": 0.5}, {0, 1, 2, 3, 4}),
        ({"temperature": 2.0}, {0, 1, 2, 3, 4}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 50}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.5}, {1, 3}),  # 0.49 does not reach a half, with 0.22 it does
        ({"top_p": 0.45}, {1}),
        ({"top_p": 1e-9}, {1}),
        ({"top_k": 3, "top_p": 0.8}, {1, 3}),  # of the three best: 0.57, 0.83
        ({"top_p": 0.8, "temperature": 2.0}, {0, 1, 3, 4}),  # flatter: 0.34, 0.57, 0.76, 0.90
    ],
)
def test_sampling_has_the_exact_distribution(options, kept):
    """Only the kept entries appear, as often as softmax(logits / temperature) over them says (chi square)."""
    counts, kept = frequencies(LOGITS, **options), sorted(kept)
    weights = (torch.tensor(LOGITS, dtype=torch.float64) / options.get("temperature", 1.0)).exp()[kept]
    expected = weights / weights.sum() * 20000
    assert counts.sum() == counts[kept].sum() == 20000
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 20  # 4 degrees of freedom: p = 0.0005


def test_rows_that_sample_differently_share_a_batch():
    """Every row follows its own temperature, top_k and top_p; without cuts nothing need be sorted."""
    n, V = 4000, len(LOGITS)
    settings_ = [(0.0, 0, 2.0), (1.0, 0, 2.0), (1.0, 2, 2.0), (0.5, 0, 0.45)]
    temperature, top_k, top_p = (torch.tensor(column).repeat(n) for column in zip(*settings_, strict=True))
    logits_, seeds = torch.tensor(LOGITS).repeat(4 * n, 1), torch.arange(4 * n)
    drawn = ts.sample(logits_, temperature, top_k, top_p, seeds, torch.tensor(3), V).view(n, 4)
    assert set(drawn[:, 0].tolist()) == set(drawn[:, 3].tolist()) == {1}
    assert set(drawn[:, 1].tolist()) == {0, 1, 2, 3, 4} and set(drawn[:, 2].tolist()) == {1, 3}
    share = (drawn == 1).double().mean(0)
    assert abs(share[1] - 0.4888) < 0.04 and abs(share[2] - 0.6900) < 0.04
    assert torch.equal(frequencies(LOGITS, width=0), frequencies(LOGITS))


def test_noise_is_uniform_over_the_ids():
    """Equal logits: all 1,024 ids are as likely (chi square), for seeds that count up and for steps that do."""
    flat, zeros, count = torch.zeros(8192, 1024), torch.zeros(8192, dtype=torch.long), torch.arange(8192)
    for seeds, counters in ((count, zeros + 5), (zeros + 5, count), (count * 0x9E3779B1 % 2**32, zeros)):
        drawn = ts.sample(flat, torch.ones(8192), zeros, zeros + 2.0, seeds, counters, 0)
        assert 840 < ((torch.bincount(drawn, minlength=1024) - 8) ** 2 / 8).sum() < 1210  # 1,023 of freedom, sigma 45


def test_sampling_repeats_with_its_seed(generator):
    """Equal seeds, equal text; equal prompts of a batch differ; a row draws the same in any batch."""
    options = {"max_tokens": 10, "temperature": 1.0}
    rows = [generator.generate(PROMPTS, **options, seed=seed) for seed in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2]
    assert ts.Generator(generator.model, generator.tokenizer, 2).generate(PROMPTS, **options, seed=1) == rows[0]
    assert generator.generate(PROMPTS[:1], **options, seed=1) == rows[0][:1]
    assert len(set(map(tuple, generator.generate([PROMPTS[0]] * 5, **options)))) == 5
    greedy = generator.generate(PROMPTS, max_tokens=10, temperature=0)
    for only in ({"top_k": 1}, {"top_p": 1e-9}):
        assert generator.generate(PROMPTS, **options, **only) == greedy


# ---- the calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2+3*4", "14"), (" (2 + 3) * 4 ", "20"), ("48/2", "24"), ("1/4", "0.25"), ("1/3", "0.333333333333"),
        ("0.1*3", "0.3"), ("7//2", "3"), ("-7//2", "-4"), ("7%3", "1"), ("2**10", "1024"), ("2**-1", "0.5"),
        ("1,000*2", "2000"), ("1,234,567+.5", "1234567.5"), ("--5", "5"), ("+30+46", "76"), ("3*+6", "18"),
        ("1e3", "1000"), ("1e20/3", "3.33333333333e+19"), ("10**15", "1000000000000000"), ("5.0", "5"), ("-0.0", "0"),
        ("'strawberry'.count('r')", "3"), ("\"it's\".count(\"'\")", "1"), ("'1,000'.count(',')+1", "2"),
        ("'abc'.count('')", "4"), ("9*'a'.count('a')", "9"),
        ("1" + "+1" * 100, "101"), ("1.5**100", "4.06561177535e+17"), (f"'{'a' * 243}'.count('a')", "243"),
    ],
)  # fmt: skip
def test_calculator(expression, result):
    assert ts.calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "", " ", "x", "abs(1)", "__import__('os')", "'a'", "'a'*9", "'a'+'b'", "'%s'%3", "'a'.upper()", "'a'.count",
        "1j", "'a'.count('a','b')", "'a'.count(1)", "(1).count('a')", "'a'.count(sub='a')", "'a'.count(*'a')", "[1]",
        "1,2", "(1,2)", "1,00", "1_000", "0x10", "True", "1==1", "1 if 1 else 2", "lambda:1", "1<2", "~1", "not 1",
        "1@2", "007", "1/0", "0**-1", "(-8)**0.5", "9**9**9", "10**400", "2.0**2000", "1e400", "9" * 31,
        "1+" * 200 + "1", "-" * 120 + "1", "(" * 300, "(" * 100 + "1" + ")" * 101, "1\n+1", "'a\\x'.count('a')",
        "f'a'.count('a')", "b'a'.count(b'a')", "'a'.count('a').count('a')", "'é\x00'.count", "1+", "*", "5%", "1 2",
        "'a''", "1.count('a')", "\ud800",
        "1" + "+1" * 101, "1.5**101", f"'{'a' * 244}'.count('a')",
    ],
)  # fmt: skip
def test_calculator_refuses(expression):
    assert ts.calculate(expression) is None


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.one_of(st.text(max_size=300), st.text("0123456789.,+-*/%() e'\"countab", max_size=60)))
def test_calculator_never_raises(text):
    """Whatever a model writes, the answer is short or None."""
    result = ts.calculate(text)
    assert result is None or 0 < len(result) <= 31


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_calculator_is_exact(data):
    """Random arithmetic against fractions."""
    tree = st.recursive(st.integers(0, 99).map(lambda n: (str(n), Fraction(n))), lambda inner: st.tuples(
        inner, st.sampled_from("+-*"), inner).map(lambda t: (f"({t[0][0]} {t[1]}{t[2][0]})", {
            "+": t[0][1] + t[2][1], "-": t[0][1] - t[2][1], "*": t[0][1] * t[2][1]}[t[1]])), max_leaves=8)  # fmt: skip
    (a, x), (b, y) = data.draw(tree), data.draw(tree)
    assert ts.calculate(a) == str(x)
    if y:
        assert float(ts.calculate(f"{a}/{b}")) == pytest.approx(float(x / y), rel=1e-11)


def test_calculator_in_threads():
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        results = list(threads.map(ts.calculate, [f"{i}*{i}" if i % 2 else "9**9**9" for i in range(200)]))
    assert results == [str(i * i) if i % 2 else None for i in range(200)]


# ---- tool calls


def scripted(monkeypatch, generator, plan, prompts, tokenizer=None, **options) -> list[ts.Completion]:
    """Sampled tokens come from plan[row][i] in the i-th step of the batch, then from the model (argmax)."""
    steps = iter(range(10**6))

    def planned(logits_BV, *rest):
        i = next(steps)
        ids = [row[i] if i < len(row) else z.argmax().item() for row, z in zip(plan, logits_BV, strict=True)]
        return torch.tensor(ids)

    monkeypatch.setattr(ts, "sample", planned)
    return ts.Generator(generator.model, tokenizer or generator.tokenizer).complete(prompts, **options)


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
    bare = SimpleNamespace(bos_id=tok.bos_id, vocab_size=300, decode=tok.decode, encode=tok.encode,
                           specials={k: v for k, v in tok.specials.items() if "output" not in k})  # fmt: skip
    (none,) = scripted(monkeypatch, generator, plan, prompts, bare, max_tokens=n + 3, tools=True)
    assert none.tokens == plain.tokens


# ---- text


def pieces_of(generator, ids) -> list[str]:
    scripted = ts.Generator(generator.model, generator.tokenizer)
    scripted.stream = lambda prompts, **options: iter([[token] for token in ids])
    return list(scripted.stream_text("x"))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(max_size=20))
def test_streamed_text_never_breaks_a_character(generator, text):
    """Characters that arrive byte by byte come out whole."""
    pieces = pieces_of(generator, list(text.encode()))  # ids below 256 are bytes
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 290), max_size=20))
def test_streamed_pieces_add_up_to_the_decoded_text(generator, ids):
    """Also for bytes that are no text, and for tokens that hold parts of characters."""
    expected = codecs.decode(generator.tokenizer.decode_bytes(ids), "utf-8", "replace")
    assert "".join(pieces_of(generator, ids)) == generator.tokenizer.decode(ids) == expected


def test_stream_text_continues_the_prompt(generator):
    """The prompt goes in behind a BOS, and the pieces are the decoded greedy ids."""
    prompt = [generator.tokenizer.bos_id, *generator.tokenizer.encode("the rest")]
    expected = generator.tokenizer.decode(argmax_loop(generator, prompt, 15))
    assert "".join(generator.stream_text("the rest", max_tokens=15, temperature=0.0)) == expected


def test_context_overflow(generator):
    """A prompt of 60 leaves room for 5 of 64 (the newest token needs no place); the error says so."""
    (prompt,) = random_documents((60,), vocab=290)
    assert generator.generate([prompt], max_tokens=5, temperature=0.0) == [argmax_loop(generator, prompt, 5)]
    with pytest.raises(ts.UserError, match="60 tokens and 6 new ones exceed the context of 64.*at most 5"):
        generator.generate([[1], prompt], max_tokens=6)
    with pytest.raises(ts.UserError, match="prompt is empty"):
        generator.generate([[]])
    with pytest.raises(ts.UserError, match="at least 1"):
        generator.generate([[1]], max_tokens=0)
    decoder = ts.Decoder(generator.model, generator.tokenizer, 2)
    good = ts.Completion(PROMPTS[1], 9, temperature=0.0)
    decoder.admit({0: good})
    decoder.step()
    with pytest.raises(ts.UserError, match="at most 5"):
        decoder.admit({1: ts.Completion(prompt, 10**9)})
    run_out(decoder)
    assert good.tokens == argmax_loop(generator, good.prompt, 9)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_graph_equals_plain_path(generator, monkeypatch, compile, dtype):
    """A captured step with kernels against fp32 on the CPU, both fed the CPU's tokens: logits to the dtype's rounding.

    Rows come late, one is taken again, and sampling goes through graphs of several widths.
    """
    config = tiny_config(width=256, head_dim=64, mlp_width=512, vocab_size=300)
    plain = random_model(config)
    model = ts.GPT(config, "cuda", dtype)
    model.load_state_dict({k: v.to(model.state_dict()[k].dtype) for k, v in plain.state_dict().items()})
    plain.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    model.attention = ts.choose_attention(model, lambda text: None)
    sides = [ts.Decoder(m, generator.tokenizer, 4, 64, compile and m is model) for m in (model, plain)]
    seen = [torch.zeros(4, config.padded_vocab, device=side.tokens.device) for side in sides]
    for side, out in zip(sides, seen, strict=True):
        side.decode = functools.partial(lambda decode, out, *args: out.copy_(decode(*args)), side.decode, out)
    assert sides[0].graphs == {} and sides[1].graphs is None
    texts, errors = random_documents((3, 20, 9, 1, 17), vocab=290), []
    samplings = [{}, {"temperature": 0.0}, {"top_k": 0}, {"top_p": 0.9, "top_k": 0}, {"temperature": 0.0}]
    for step in range(60):
        if step % 8 == 0 and step < 40:
            row = (0, 1, 2, 3, 0)[step // 8]
            for side in sides:
                side.free(row)
                side.admit({row: ts.Completion(texts[step // 8], 30, seed=step, **samplings[step // 8])})
        if sides[1].live:
            before = {row: len(c.tokens) for row, c in sides[1].live.items()}
            for side in sides:
                side.step()
            sides[0].tokens.copy_(sides[1].tokens)
            errors += [(seen[0][row].cpu() - seen[1][row]).abs().max().item() for row in before]
            if set(sides[0].live) != set(sides[1].live):  # a BOS that only one of them drew
                for row in set(sides[0].live) ^ set(sides[1].live):
                    for side in sides:
                        side.free(row)
    # Logits have a standard deviation of 3. bf16 on a CPU has errors of 0.2 (median of the largest) and 0.35 at most.
    median, most = (0.4, 1.0) if dtype == torch.bfloat16 else (1e-3, 1e-2)
    assert len(errors) > 60 and sorted(errors)[len(errors) // 2] < median and max(errors) < most
    assert sorted(sides[0].graphs) == [-1, 64, 300]


@pytest.mark.gpu
def test_generator_on_a_gpu(generator):
    """fp32 on the GPU gives the CPU's greedy tokens, with rows that are taken again, twice."""
    model = random_model(tiny_config()).cuda()
    mine = ts.Generator(model, generator.tokenizer, rows=2)
    for _ in range(2):
        answers = mine.generate(PROMPTS, max_tokens=20, temperature=0.0)
        assert answers == [argmax_loop(generator, prompt, 20) for prompt in PROMPTS]
    for cut in ({}, {"top_k": 0}, {"top_k": 0, "top_p": 0.8}):
        options = {"max_tokens": 10, "temperature": 1.0, "seed": 3, **cut}
        assert mine.generate(PROMPTS, **options) == generator.generate(PROMPTS, **options)
