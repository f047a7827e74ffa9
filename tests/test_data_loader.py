"""Shards to packs: no text lost, exact targets, and a reader state from which everything can be repeated."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
import train_small as ts

from tiny import ALONE, CPU, FIELDS, list_files, loader_of, segments, tiny_config  # isort: skip
from tiny import validation_of, write_dataset, write_shard  # isort: skip


def batches(dataset, config, ranks=ALONE, reader_state=None, first_step=0, most=10**9) -> list[ts.Batch]:
    """Batches until the run or the text ends."""
    loader = loader_of(dataset, config, ranks, reader_state, first_step)
    out = []
    try:
        while first_step + len(out) < config.num_steps and len(out) < most:
            out.append(loader.next())
    except ts.UserError as error:
        assert "ran out of text" in str(error)
    loader.close()
    return out


def text_of(dataset, split="train") -> np.ndarray:
    return np.concatenate([np.fromfile(p, "<u2", offset=1024) for p in dataset.files(split)]).astype(int)


def same(a: ts.Batch, b: ts.Batch) -> bool:
    return all(torch.equal(getattr(a, f), getattr(b, f)) for f in FIELDS) and a.reader_state == b.reader_state


@pytest.fixture(scope="module")
def epochs(dataset):
    """All batches of two epochs, of both stages."""
    config = tiny_config(tokens=2 * len(text_of(dataset)), max_epochs=2)
    return config, batches(dataset, config)


def test_no_token_is_lost_or_repeated(dataset, epochs):
    """Segments behind each other, without the BOS that the loader put in, are the text of the shards, twice over."""
    config, found = epochs
    bos, text = dataset.tokenizer.bos_id, np.tile(text_of(dataset), 3).tolist()
    at, inserted, lengths = 0, 0, []
    for step, batch in enumerate(found):
        stage = config.stage_table[ts.stage_index(config, step)]
        assert batch.max_doc == 64 and batch.tokens.shape == (stage.packs, 128)
        for row in range(stage.packs):
            for inputs, targets in segments(batch, row):
                if targets[0] == -1:  # padding
                    assert set(targets) == {-1} and set(inputs) == {bos} and len(inputs) <= 64
                    continue
                assert inputs[0] == bos and len(inputs) <= 64
                body = inputs if text[at] == bos else inputs[1:]
                inserted += len(inputs) - len(body)
                assert body == text[at : at + len(body)] and bos not in body[1:]
                at += len(body)
                assert targets == [*inputs[1:], text[at]], "targets are the next tokens"
                lengths.append(len(inputs))
    assert at > 1.5 * len(text_of(dataset)), "the test should see the second epoch"
    assert inserted > 10 and min(lengths) == 1 and max(lengths) == 64
    assert [b.reader_state["epoch"] for b in found] == sorted(b.reader_state["epoch"] for b in found)


def test_positions_ends_and_counts(epochs):
    """Positions restart at every end and nowhere else; ends are padded; the counted targets are the real ones."""
    config, found = epochs
    for batch in found:
        for row in range(len(batch.tokens)):
            ends, positions = batch.ends[row].tolist(), batch.positions[row].tolist()
            assert ends == sorted(ends) and ends[-1] == 128
            borders = [0, *sorted(set(ends))]
            expected = [i for a, b in zip(borders, borders[1:], strict=False) for i in range(b - a)]
            assert positions == expected
        assert batch.total_targets == int((batch.targets >= 0).sum())
        assert batch.total_tokens == batch.tokens.numel()
    assert any(b.total_targets < b.total_tokens for b in found), "some pack should hit max_docs_per_pack and be padded"


def test_any_position_continues_exactly(dataset, epochs):
    """A loader that starts at the reader state of a batch yields the batches that follow it, over shards and epochs."""
    config, found = epochs
    for i in range(0, len(found) - 3, 2):
        later = batches(dataset, config, reader_state=found[i].reader_state, first_step=i + 1, most=3)
        assert len(later) == 3 and all(map(same, later, found[i + 1 :]))


@pytest.mark.parametrize("packs", (1, 2, 4))
def test_micro_batches(epochs, packs):
    """Micro-batches are the packs in order; their document borders are where the positions restart."""
    batch = epochs[1][-1]
    parts = list(batch.micro_batches(packs, CPU))
    assert len(parts) == 4 // packs
    for i, field in enumerate(FIELDS[:3]):
        assert torch.equal(torch.cat([part[i] for part in parts]), getattr(batch, field).flatten())
    for _, _, positions, cu_seqlens, max_doc in parts:
        assert cu_seqlens.dtype == torch.int32 and cu_seqlens[0] == 0 and cu_seqlens[-1] == packs * 128
        assert (cu_seqlens.diff() >= 0).all() and cu_seqlens.diff().max() <= max_doc == 64
        starts = torch.cat((torch.nonzero(positions == 0)[:, 0], torch.tensor([packs * 128])))
        assert torch.equal(cu_seqlens.unique(), starts.int())


def test_loader_reports_the_end_of_the_text(dataset):
    """One epoch more than there is ends with a sentence that names both ways out."""
    config = tiny_config(tokens=10**6)
    loader = loader_of(dataset, config)
    with pytest.raises(ts.UserError, match="ran out of text after 1 epoch.*--tokens.*--max-epochs"):
        for _ in range(config.num_steps):
            loader.next()
    loader.close()
    found = batches(dataset, config)
    assert len(found) > 20 and {batch.reader_state["epoch"] for batch in found} == {0}, "no text comes twice unasked"


def test_hosted_shard_without_extras_loads(tmp_path, dataset):
    """A header with three words (llm.c, modded-nanogpt) is enough, and a shard may begin inside a document."""
    root = write_dataset(tmp_path / "hosted", hashes=False)
    first = root / "pretrain" / "train_000000.bin"
    write_shard(first, ts.Dataset.open(root).read(first)[5:])
    list_files(root)
    hosted = ts.Dataset.open(root)
    (batch,) = batches(hosted, tiny_config(), most=1)
    assert batch.tokens[0, 0] == hosted.tokenizer.bos_id
    assert batch.tokens[0, 1:48].tolist() == text_of(hosted)[:47].tolist()
    assert np.array_equal(hosted.read(hosted.files("val")[0]), dataset.read(dataset.files("val")[0]))


def test_a_damaged_shard_ends_the_loader(tmp_path, dataset_dir):
    """What the loader's thread finds is raised by next(), after the batches before it."""
    for number, whole in ((0, 0), (1, 2)):
        root = shutil.copytree(dataset_dir, tmp_path / f"damaged_{number}")
        shard = root / "pretrain" / f"train_{number:06d}.bin"
        shard.write_bytes(shard.read_bytes()[:-2] + b"\0\0")
        loader = loader_of(ts.Dataset.open(root), tiny_config())
        for _ in range(whole):
            loader.next()
        with pytest.raises(ts.UserError, match=f"{shard} was changed"):
            for _ in range(20):
                loader.next()
        loader.close()


def test_validation_batch(dataset):
    """Every validation document once, whole from its BOS, cut at the context; nothing continued; packs padded."""
    config = tiny_config(val_tokens=10**9)
    batch = validation_of(dataset, config)
    bos = dataset.tokenizer.bos_id
    text = text_of(dataset, "val")
    starts = [*np.flatnonzero(text == bos), len(text)]
    documents = [text[a:b][:64].tolist() for a, b in zip(starts, starts[1:], strict=False)]
    found = [s for row in range(len(batch.tokens)) for s in segments(batch, row)]
    real = [inputs + targets[-1:] for inputs, targets in found if targets[0] != -1]
    assert real == [d for d in documents if len(d) > 1] and {len(d) for d in real} >= {2, 64}
    assert all(inputs[1:] == targets[:-1] for inputs, targets in found if targets[0] != -1)
    assert all(set(targets) == {-1} and len(targets) <= 64 for _, targets in found if targets[0] == -1)
    assert batch.total_targets == sum(len(d) - 1 for d in real) == int((batch.targets >= 0).sum())
    assert batch.max_doc == 64 and batch.reader_state is None
    for max_docs_per_pack in (1, 2):  # few documents in a pack
        narrow = validation_of(dataset, dataclasses.replace(config, max_docs_per_pack=max_docs_per_pack))
        assert len(narrow.tokens) >= -(-len(real) // max_docs_per_pack) and narrow.total_targets == batch.total_targets


def test_validation_stops_after_val_tokens(dataset):
    """The document that crosses val_tokens is the last one, and it is whole."""
    everything, some = (validation_of(dataset, tiny_config(val_tokens=n)) for n in (10**9, 70))
    assert some.total_targets < everything.total_targets
    lengths = [len(t) for row in range(len(everything.tokens)) for _, t in segments(everything, row) if t[0] != -1]
    cumulative = np.cumsum(lengths)
    assert some.total_targets == cumulative[np.searchsorted(cumulative, 70)]
