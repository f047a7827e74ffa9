"""The Hugging Face repository: the tokenizer token by token, logits and generation through transformers, the card."""

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken
import torch
import train_small as ts
from safetensors.torch import load_file

from conftest import ROOT, random_model, tiny_config

sys.path.insert(0, str(ROOT / "data"))
sys.path.insert(0, str(ROOT / "runs"))
import engine
import export
import format
import sft
import sources
import tokenizer

VARIED = [
    "", " ", "a", "the rest\n\n of  it\t ", "l'été, naïve: 你好 😀\u200d👧 e\u0301", "1 12 123 1234 ٣٤ Ⅷ ½", "I'LL 'ſ",
    "def f(x):\r\n        return x  # ...\n", "\x00\x01\x1c\x85\u2028\u3000\ufeff", "aaaa" * 9, " " * 70 + "x",
    "-=" * 40, "<|bos|>", "x<|user_end|><|bos|> <|bo", "\U0010ffff\ud7ff",
]  # fmt: skip


@pytest.fixture(scope="session")
def bpe(tmp_path_factory) -> Path:
    """A tokenizer of 900 entries, trained on a little of the standard library."""
    documents = list(sources.open_source("stdlib", max_documents=60).train())
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    format.write_json(path, tokenizer.train(iter(documents), 900))
    return path


def write_run(folder: Path, bpe: Path, chat: bool = False, model=None, **overrides) -> Path:
    """A run directory with a model of random weights, as pretraining or (chat) finetuning leaves it."""
    config = tiny_config(**{"vocab_size": 900, "dtype": "float32", "data": "/home/me/secret", **overrides})
    model = model or random_model(config)
    folder.mkdir(parents=True)
    state = {"step": 7, "attention": ts.stage_attention(config, 1), "val_bpb": 1.25}
    ts.write_checkpoint(folder, model.state_dict(), {}, state)
    description = {"config": dataclasses.asdict(config), "command": "sft" if chat else "pretrain", "flags": []}
    ts.write_description(folder, description)
    entries = [{"step": 5, "loss": 2.0}, {"step": 7, "val_bpb": 1.25, "tokens": 4096}, {"step": 9, "val_bpb": 9.0}]
    (folder / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    shutil.copy(ROOT / "train_small.py", folder)
    shutil.copy(bpe, folder / "tokenizer.json")
    return folder


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    alphabets = ["  \t\n\r\x0b\u00a0\u2028'sSdtlLvVeErR12½.,ab", "aab ..--==\n", ["<|bos|>", "<|", "|>", "user", " "]]
    texts = []
    for i in range(count):
        if i % 2:
            texts.append("".join(rng.choices(alphabets[i // 2 % 3], k=rng.randint(1, 30))))
        else:
            pick = lambda: rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x1F000, 0x1FFFF)))  # noqa: E731
            texts.append("".join(chr(pick()) for _ in range(rng.randint(1, 12))))
    return texts


def test_tokenizer_equals_the_projects(bpe):
    """`tokenizers` gives the ids of tiktoken for prose, code, odd blanks, digits and any Unicode, and decodes them."""
    from tokenizers import Tokenizer

    own = ts.Tokenizer(bpe)
    spec = json.loads(bpe.read_text())
    theirs = Tokenizer.from_str(json.dumps(export.convert_tokenizer(spec, list(own.mergeable), "<|bos|>")))
    assert theirs.get_vocab_size() == own.vocab_size == 900
    texts = VARIED + random_texts(3000) + [(ROOT / "train_small.py").read_text(encoding="utf-8")]
    for text in texts:
        theirs.encode_special_tokens = True  # what spells a special token stays text, as in the project
        ids = own.encode(text)
        assert theirs.encode(text, add_special_tokens=False).ids == ids, repr(text)
        assert theirs.encode(text).ids == [own.bos_id, *ids]
        theirs.encode_special_tokens = False
        expected = own.encoding.encode(text, allowed_special="all")
        assert theirs.encode(text, add_special_tokens=False).ids == expected, repr(text)
        assert theirs.decode(expected, skip_special_tokens=False) == text


def test_tokens_that_no_merge_reaches(bpe):
    """A whole word that is a token is one token, and every pair that spells a token merges, as in tiktoken."""
    from tokenizers import Tokenizer

    tokens = [bytes([b]) for b in range(256)] + [b"bc", b"ab", b"cd", b"abc", b"island", b"bcd"]
    spec = {"pattern": tokenizer.PATTERN, "special_tokens": {"<|bos|>": len(tokens)}}
    theirs = Tokenizer.from_str(json.dumps(export.convert_tokenizer(spec, tokens, "<|bos|>")))
    own = tiktoken.Encoding("x", pat_str=spec["pattern"], mergeable_ranks={t: i for i, t in enumerate(tokens)},
                            special_tokens=spec["special_tokens"])  # fmt: skip
    rng = random.Random(1)
    texts = ["island", "islands", *("".join(rng.choices("abcd", k=rng.randint(1, 9))) for _ in range(2000))]
    for text in texts:
        assert theirs.encode(text, add_special_tokens=False).ids == own.encode_ordinary(text), text


TRY = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
folder, half, request = sys.argv[1], sys.argv[2], json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
answer = {"ids": tokenizer(request["text"])["input_ids"], "dtype": str(model.dtype)}
answer["chat"] = tokenizer.apply_chat_template(request["chat"], add_generation_prompt=True)["input_ids"]
rows, longest = request["rows"], max(map(len, request["rows"]))
with torch.no_grad():
    for side in ("left", "right"):
        pad = lambda row, value: [value] * (longest - len(row))
        lay = lambda row, fill, value: pad(row, value) + fill if side == "left" else fill + pad(row, value)
        ids = torch.tensor([lay(row, row, 5) for row in rows])
        mask = torch.tensor([lay(row, [1] * len(row), 0) for row in rows])
        out = model(input_ids=ids, attention_mask=mask)
        answer[side] = [out.logits[i][mask[i].bool()].tolist() for i in range(len(rows))]
        answer[f"{side}_loss"] = model(input_ids=ids, attention_mask=mask, labels=ids).loss.item()
        if side == "left":
            made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False,
                                  eos_token_id=request["eos"], pad_token_id=request["eos"])
            answer["generated"] = made[:, longest:].tolist()
    alone = model(input_ids=torch.tensor(rows[:1]), labels=torch.tensor(rows[:1]))
    answer["loss"], answer["no_mask"] = alone.loss.item(), alone.logits[0].tolist()
sampled = model.generate(input_ids=torch.tensor(rows[:1]), max_new_tokens=12, temperature=3.0, top_k=0)
answer["sampled"] = max(sampled[0].tolist())
try:
    model(input_ids=torch.zeros(1, 65, dtype=torch.long))
except ValueError as error:
    answer["error"] = str(error)
model.save_pretrained(folder + "-again")
tokenizer.save_pretrained(folder + "-again")
again = AutoModelForCausalLM.from_pretrained(folder + "-again", trust_remote_code=True)
with torch.no_grad():
    answer["again"] = again(input_ids=torch.tensor(rows[:1])).logits[0].tolist()
other = AutoModelForCausalLM.from_pretrained(half, trust_remote_code=True, dtype="auto")
kinds = {str(p.dtype) for n, p in other.named_parameters() if "scalars" not in n}
rough = other(input_ids=torch.tensor(rows[:1])).logits[0].tolist()
answer["half"] = [sorted(kinds), str(other.gpt.scalars.dtype), rough]
print(json.dumps(answer))
"""


def test_transformers_gives_the_scripts_logits_and_text(bpe, tmp_path):
    """In a process of its own: logits at 1e-3 with padding on either side, greedy generation, chat template, bf16."""
    run_dir = write_run(tmp_path / "run", bpe, chat=True)
    out, half = tmp_path / "model", tmp_path / "half"
    export.export(run_dir, out)
    export.export(run_dir, half, dtype="bfloat16")
    script = engine.import_script(run_dir)
    model, own, config = engine.load_model(script, run_dir, None, "cpu", {})
    rng = random.Random(3)
    rows = [[own.bos_id, *rng.choices(range(250), k=n)] for n in (20, 1, 50)]
    parts = [{"type": "text", "text": "see "}, {"type": "python", "text": "1+1"},
             {"type": "python_output", "text": "2"}, {"type": "text", "text": "\ntwo"}]  # fmt: skip
    conversation = [("system", "Be brief."), ("user", "1+1?"), ("assistant", parts), ("user", "é\n sure? ")]
    request = {"text": "the rest\n 12", "rows": rows, "eos": own.bos_id,
               "chat": [{"role": role, "content": content} for role, content in conversation]}  # fmt: skip
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", TRY, str(out), str(half)], input=json.dumps(request), text=True,
                          capture_output=True, env=env, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])

    def reference(row):
        T = len(row)
        with torch.no_grad():
            ids, positions = torch.tensor(row).int(), torch.arange(T)
            return model(ids, None, positions, torch.tensor([0, T], dtype=torch.int32), T)[:, : config.vocab_size]

    for side in ("left", "right"):
        for row, found in zip(rows, answer[side], strict=True):
            torch.testing.assert_close(torch.tensor(found), reference(row), atol=1e-3, rtol=0)
    for key in ("no_mask", "again"):
        torch.testing.assert_close(torch.tensor(answer[key]), reference(rows[0]), atol=1e-3, rtol=0)
    loss = torch.nn.functional.cross_entropy(reference(rows[0])[:-1], torch.tensor(rows[0][1:]))
    assert abs(answer["loss"] - loss.item()) < 1e-4 and answer["dtype"] == "torch.float32"
    nats = torch.cat([-reference(row)[:-1].log_softmax(-1)[range(len(row) - 1), row[1:]] for row in rows])
    for side in ("left", "right"):
        assert abs(answer[f"{side}_loss"] - nats.mean().item()) < 1e-4, "padding is no target and predicts none"
    expected = engine.Generator(model, own).generate(rows, max_tokens=8, temperature=0.0)
    stopped = [row[: row.index(own.bos_id)] if own.bos_id in row else row for row in answer["generated"]]
    assert stopped == expected and max(map(len, expected)) == 8
    assert answer["sampled"] < 900 and "65 tokens but the model's context is 64" in answer["error"]
    assert answer["ids"] == [own.bos_id, *own.encode("the rest\n 12")]
    messages = sft.check_messages({"messages": request["chat"]})
    tokens, _ = sft.render(messages, lambda text: own.encode(text) or [], own.specials)
    assert answer["chat"] == [*tokens.tolist(), own.specials["<|assistant_start|>"]]
    kinds, scalars, rough = answer["half"]
    assert kinds == ["torch.bfloat16"] and scalars == "torch.float32"
    close = (torch.tensor(rough).argmax(-1) == reference(rows[0]).argmax(-1)).float().mean()
    assert close > 0.5 and load_file(half / "model.safetensors")["gpt.scalars"].dtype == torch.float32


def test_card_and_files(bpe, tmp_path, capsys):
    """Results come from the report, or from the log up to the saved step; nothing names this computer."""
    run_dir = write_run(tmp_path / "run", bpe)
    export.export(run_dir, tmp_path / "model", name="me/tiny")
    assert "base model" in capsys.readouterr().out
    names = {"README.md", "config.json", "configuration_decoderstack.py", "generation_config.json",
             "model.safetensors", "modeling_decoderstack.py", "tokenizer.json", "tokenizer_config.json",
             "train_small.py"}  # fmt: skip
    assert {p.name for p in (tmp_path / "model").iterdir()} == names and not list(tmp_path.glob(".*"))
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| validation, bits per byte | 1.25 |" in card and "base model" in card and "me/tiny" in card
    assert "chat_template" not in json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    texts = [p.read_text() for p in (tmp_path / "model").iterdir() if p.suffix in (".json", ".md", ".py")]
    assert not any("/home/me" in text or str(tmp_path) in text for text in texts)
    assert (tmp_path / "model" / "train_small.py").read_bytes() == (ROOT / "train_small.py").read_bytes()
    (run_dir / "report.md").write_text("# r\n\n| | |\n| --- | --- |\n| speed | 5 |\n\n| other | x |\n")
    (run_dir / "curve.png").write_bytes(b"png")
    (run_dir / "core.csv").write_text("task,accuracy\ncopa,0.5\n")
    (tmp_path / "empty").mkdir()
    export.export(run_dir, tmp_path / "empty")
    card = (tmp_path / "empty" / "README.md").read_text()
    assert "| speed | 5 |\n" in card and "| copa | 0.5 |" in card and "curve.png" in card and "other" not in card
    assert (tmp_path / "empty" / "curve.png").read_bytes() == b"png"


def test_user_errors(bpe, tmp_path, monkeypatch, capsys):
    """One sentence, exit code not 0, and nothing is left behind."""
    run_dir, full = write_run(tmp_path / "run", bpe), tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("mine")
    broken = write_run(tmp_path / "broken", bpe)
    (broken / "checkpoints/step_000007/model.safetensors").write_bytes(b"x")
    bare = write_run(tmp_path / "bare", bpe)
    (bare / "config.json").unlink()
    new = tmp_path / "new"
    for args, message in [
        ((run_dir, full), "not an empty folder"), ((run_dir, full / "x"), "not an empty folder"),
        ((tmp_path / "none", new), "0 training scripts"), ((bare, new), "not a run directory"),
        ((run_dir, new, "--step", "8"), "no checkpoint of step 8"), ((broken, new), "cannot be read"),
        ((run_dir, full / "x" / "y"), "cannot write"),
    ]:  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["export.py", str(args[0]), "--out", *map(str, args[1:])])
        with pytest.raises(SystemExit) as end:
            export.main()
        assert message in end.value.code and end.value.code.startswith("error: ") and "\n" not in end.value.code
    assert not new.exists() and [p.name for p in full.iterdir()] == ["x"] and not list(tmp_path.glob(".*"))
