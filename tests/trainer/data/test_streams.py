"""Packed batches: every token once an epoch, the same on any number of processes, and an exact position."""

import json
from collections import Counter
from contextlib import ExitStack, closing
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from conf.formats import RunFileError
from conf.schema.training.data import Corpus
from conf.schema.training.loop import LmLoop
from tests.trainer.data.corpora import lm_loop, make_documents, write_jsonl, write_parquet, write_text
from trainer.data import batches
from trainer.distributed.mesh import Batch
from trainer.tokenizer import loading

ROWS, SEQUENCE, STREAMS = 8, 32, 4
LOOP = lm_loop(ROWS, SEQUENCE)
PROCESSES = 4
PACKINGS = ("stream", "documents")


def texts() -> list[str]:
    return make_documents(120)


@pytest.fixture(params=["text", "parquet", "few groups"])
def corpus(request, tmp_path):
    """A function from keys to the same documents as another kind of file."""

    def made(**keys) -> Corpus:
        keys = {"streams": STREAMS, "eval_fraction": 0.1} | keys
        if request.param == "text":
            return write_text(tmp_path / "a.txt", texts(), **keys)
        # 40 row groups are dealt to the streams, of 3 each stream takes its documents
        return write_parquet(tmp_path / "a.parquet", texts(), 3 if request.param == "parquet" else 50, **keys)

    return made


def opened(data: Corpus, process: int = 0, processes: int = 1, loop: LmLoop = LOOP) -> Any:
    """The stream of a process, for a `with` statement."""
    share = loop.rows // processes
    return closing(batches.Dataset(data).train_batches(loop, 5, range(process * share, (process + 1) * share)))


def made(data: Corpus, count: int, processes: int = 1) -> list[Batch]:
    """So many global batches, put together from what each process holds."""
    with ExitStack() as stack:
        parts = [stack.enter_context(opened(data, i, processes)) for i in range(processes)]
        found = [[next(part) for part in parts] for _ in range(count)]
    return [{name: np.concatenate([p[name] for p in step]) for name in step[0]} for step in found]


def same(one: Batch, other: Batch) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], name)


def test_a_flat_stream_holds_every_training_document_once_an_epoch(corpus):
    data = corpus(packing="stream")
    found: Counter[str] = Counter()
    for process in range(PROCESSES):
        flat: dict[int, list[int]] = {}
        with opened(data, process, PROCESSES) as stream:
            for _ in range(60):
                for row, tokens in enumerate(next(stream)["tokens"].tolist()):
                    flat.setdefault((process * ROWS // PROCESSES + row) // (ROWS // STREAMS), []).extend(tokens)
        for ids in flat.values():
            pieces = [piece.decode() for piece in bytes(i if i < 256 else 0 for i in ids).split(b"\0")[1:-1]]
            again = next(i for i, piece in enumerate(pieces) if piece in pieces[:i])  # the second epoch begins
            found.update(pieces[:again])
    assert set(found.values()) == {1}
    kept = set(validation_documents(data))
    assert 0 < len(kept) < 30
    assert set(found) == set(texts()) - kept


def test_rows_that_documents_share_hold_each_once_an_epoch(corpus):
    data = corpus(packing="documents", long_documents="skip")
    loop = lm_loop(STREAMS, SEQUENCE)
    kept = {text for text in texts() if 0 < len(text.encode()) <= SEQUENCE} - set(validation_documents(data))
    found: set[str] = set()
    for process in range(PROCESSES):
        count, checked = Counter[str](), 0
        with opened(data, process, PROCESSES, loop) as stream:
            for _ in range(100):
                batch = next(stream)
                segments, targets = batch["segments"][0], batch["targets"][0]
                count.update(bytes(targets[segments == s].tolist()).decode() for s in range(1, segments.max() + 1))
                place = stream.position()[str(process)]
                if place["next_row"] == 0 and (epochs := place["parent"]["epoch"]):  # no row is half told
                    assert set(count.values()) <= {epochs, epochs + 1}
                    checked += 1
        assert checked
        assert not found & set(count)  # no two streams share one
        found |= set(count)
    assert found == kept


def validation_documents(data: Corpus) -> list[str]:
    loop = lm_loop(ROWS, 256, eval_batches=6)
    found = batches.Dataset(data.model_copy(update={"packing": "documents"})).validation_batches(loop, range(ROWS))
    documents = []
    for batch in found:
        for ids, segments in zip(batch["targets"], batch["segments"], strict=True):
            documents += [bytes(ids[segments == s].tolist()).decode() for s in range(1, segments.max() + 1)]
    assert len(set(documents)) == len(documents)
    return documents


@pytest.mark.parametrize("packing", PACKINGS)
def test_batches_do_not_depend_on_the_number_of_processes(corpus, packing):
    data = corpus(packing=packing)
    whole = made(data, 8)
    for one, other in zip(whole, made(data, 8, 8), strict=True):
        same(one, other)
    assert len({row.tobytes() for batch in whole for row in batch["tokens"]}) > 40  # of 64


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_position_restores_the_next_batch_on_any_number_of_processes(corpus, packing):
    data = corpus(packing=packing)
    expected = made(data, 36)
    for after in (0, 7, 33):
        position = {}
        for process in range(2):
            with opened(data, process, 2) as stream:
                for _ in range(after):
                    next(stream)
                position |= stream.position()
        with opened(data) as again:
            next(again)
            again.restore(json.loads(json.dumps(position)))
            same(next(again), expected[after])
            assert again.position().keys() == position.keys()
            same(next(again), expected[after + 1])


def test_seeds_and_epochs_have_orders_of_their_own(tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", [f"{i:03}" for i in range(100)], streams=1, packing="stream")

    def order(**keys) -> list[list[bytes]]:
        loop = lm_loop(1, 4 * 99)  # an epoch: BOS and three digits; one of the 100 is for validation
        with opened(data.model_copy(update=keys), loop=loop) as stream:
            found = [next(stream)["tokens"][0] for _ in range(2)]
        return [bytes(i if i < 256 else 32 for i in row.tolist()).split() for row in found]

    first, second = order()
    assert first != second
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 99
    assert order() == [first, second]
    assert order(shuffle=False) == [sorted(first)] * 2


def test_a_flat_row_goes_on_where_the_last_ended_and_every_token_is_a_target_once(tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", texts(), streams=1, packing="stream")
    found = made_rows(data, 30)
    for before, after in pairwise(found):
        assert before["targets"][-1] == after["tokens"][0]
        np.testing.assert_array_equal(before["targets"][:-1], before["tokens"][1:])
    assert all(row["weights"].all() for row in found)


def made_rows(data: Corpus, count: int) -> list[Batch]:
    return [{n: v[r] for n, v in b.items()} for b in made(data, -(-count // ROWS)) for r in range(ROWS)]


def test_shared_rows_hold_whole_documents_that_end_in_themselves(tmp_path):
    short = [text for text in texts() if len(text.encode()) <= SEQUENCE]
    data = write_jsonl(tmp_path / "a.jsonl", short, streams=2, packing="documents")
    found = made_rows(data, 80)
    for row in found:
        for segment in range(1, row["segments"].max() + 1):
            mine = row["segments"] == segment
            ids, targets = row["tokens"][mine], row["targets"][mine]
            np.testing.assert_array_equal(row["positions"][mine], np.arange(mine.sum()))
            assert ids[0] == loading.BOS_ID  # from its beginning
            assert bytes(targets.tolist()).decode() in short  # to its end: no target is of another document
            np.testing.assert_array_equal(ids[1:], targets[:-1])
            assert row["weights"][mine].all()
        padding = row["segments"] == 0
        assert not row["weights"][padding].any()
        assert (np.diff(padding.astype(int)) >= 0).all()  # at the end
    assert np.mean([row["weights"].mean() for row in found]) > 0.9


def test_a_long_document_is_split_without_a_loss_left_out_or_refused_with_its_place(tmp_path, caplog):
    long = "".join(chr(97 + i % 26) for i in range(200))
    data = write_jsonl(tmp_path / "a.jsonl", ["short", long], streams=1, packing="documents", eval_fraction=0.01)
    other = data.model_copy(update={"eval_fraction": 0, "eval_path": data.path})
    batch = batches.Dataset(other).validation_batches(lm_loop(ROWS, SEQUENCE), range(ROWS))[0]
    targets = sorted(bytes(batch["targets"][batch["weights"] > 0].tolist()))
    assert targets == sorted((long + "short").encode())
    with opened(data.model_copy(update={"long_documents": "skip"})) as stream:
        for _ in range(30):
            next(stream)
        [counts] = stream.left_out().values()
    assert counts["documents_left_out"] > 0
    assert counts["bad_lines"] == 0
    words = rf"{tmp_path}/a\.jsonl:2 has 201 tokens, more than loop\.seq_len \+ 1 = 33"
    assert caplog.text.count("and other such documents are skipped") == 1
    with pytest.raises(RunFileError, match=rf"^data\.long_documents: {words}; set split or skip"):
        made(data.model_copy(update={"long_documents": "error"}), 1)


def test_only_the_answer_is_learnt_and_to_stop_after_it(tmp_path):
    rows = [{"q": "1+1", "a": "<<skip>>2", "n": 7}, {"q": "{2}", "a": "three"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = {"prompt": "Q {{}} {q}?", "answer": " {a}", "remove": "<<.*?>>"}
    data = write_jsonl(tmp_path / "b.jsonl", ["x"], packing="documents", streams=1, shuffle=False)
    data = type(data)(
        **data.model_dump()
        | {"path": str(tmp_path / "b.jsonl"), "eval_path": str(tmp_path / "a.jsonl"), "eval_fraction": 0}
        | {"text_column": None, "template": template, "eos": "<eos>"}
    )
    batch = batches.Dataset(data).validation_batches(lm_loop(1, 40), range(1))[0]
    learnt = []
    for segment in (1, 2):
        mine = batch["segments"][0] == segment
        targets, weights = batch["targets"][0][mine], batch["weights"][0][mine]
        assert targets[-1] == loading.EOS_ID
        learnt.append((bytes(targets[:-1].tolist()), bytes(targets[:-1][weights[:-1] > 0].tolist()), weights[-1]))
    assert sorted(learnt) == [(b"Q {} 1+1? 2", b" 2", 1.0), (b"Q {} {2}? three", b" three", 1.0)]


def test_validation_is_fixed_and_its_last_rows_are_padding(corpus):
    data = corpus(packing="stream")
    loop = lm_loop(ROWS, SEQUENCE, eval_batches=4)
    found = batches.Dataset(data).validation_batches(loop, range(ROWS))
    for one, other in zip(found, batches.Dataset(data).validation_batches(loop, range(ROWS)), strict=True):
        same(one, other)
    for one, other in zip(found, batches.Dataset(data).validation_batches(loop, range(4, ROWS)), strict=True):
        same({name: values[4:] for name, values in one.items()}, other)
    assert len(found) == 4
    assert found[0]["weights"].any()
    assert not found[3]["weights"].any()
    tokens = sum(len(text.encode()) + 1 for text in validation_documents(data))
    assert tokens - STREAMS <= sum(b["weights"].sum() for b in found) <= tokens


def test_a_position_of_other_data_is_refused(tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", texts(), streams=4)
    halved = data.model_copy(update={"streams": 2})
    grown = write_parquet(tmp_path / "a.parquet", texts(), 10, streams=4)
    windows = write_text(tmp_path / "t", ["x" * 500])
    for written, read, words in (
        (data, halved, r"data\.streams: .* was written with 4, not 2; resume with"),
        (data, grown, r"data\.path: .* was written with 1 groups, not 13 groups"),
        (data, windows, r"data\.packing: "),
        (windows, data, r"data\.packing: .* was written with windows, not stream"),
    ):
        position = batches.Dataset(written).train_batches(LOOP, 5, range(ROWS)).position()
        with pytest.raises(RunFileError, match=f"^{words}"):
            batches.Dataset(read).train_batches(LOOP, 5, range(ROWS)).restore(position)


def test_streams_must_share_the_rows_and_have_documents(tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", ["one", "two"], streams=3)
    with pytest.raises(RunFileError, match=r"^data\.streams: 3 streams cannot share the 8 rows of a batch evenly"):
        batches.Dataset(data).train_batches(LOOP, 5, range(ROWS))
    data = data.model_copy(update={"streams": 8})
    with pytest.raises(RunFileError, match=r"^data\.streams: 8 streams are too many for data\.path: stream \d gets no"):
        next(batches.Dataset(data).train_batches(LOOP, 5, range(ROWS)))
    with pytest.raises(RunFileError, match=r"^data\.path: no document is left for validation; .*eval_fraction"):
        batches.Dataset(data).validation_batches(LOOP, range(ROWS))


BAD = ('{"text": "half \\ud83d"}', "[", '{"text": 5}', '{"body": "x"}', "oops", "9" * 5000)


def with_bad_lines(tmp_path, **keys) -> Corpus:
    """The documents of `texts` with a bad line after every tenth, which are 12 bad lines."""
    data = write_jsonl(tmp_path / "bad.jsonl", texts(), **{"streams": STREAMS, "eval_fraction": 0.1} | keys)
    lines = (tmp_path / "bad.jsonl").read_text().splitlines()
    for number in range(12):
        lines.insert(11 * number, BAD[number % len(BAD)])
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    return data


@pytest.mark.parametrize("packing", PACKINGS)
def test_skipped_lines_are_the_same_and_counted_on_any_number_of_workers_and_on_resume(tmp_path, caplog, packing):
    data = with_bad_lines(tmp_path, on_bad_line="skip", packing=packing)
    for one, other in zip(made(data, 30), made(data, 30, processes=2), strict=True):
        same(one, other)
    assert "bad.jsonl:" in caplog.text
    assert "it and other such lines are skipped (data.on_bad_line)" in caplog.text
    expected, positions, counts = [], [], []
    with opened(data) as whole:
        for _ in range(30):
            expected.append(next(whole))
            positions.append(json.loads(json.dumps(whole.position())))
            counts.append(whole.left_out())
    assert 4 <= sum(count["bad_lines"] for count in counts[-1].values()) <= 48  # of 12, those not held out, per epoch
    for at in (0, 20):
        with opened(data) as resumed:
            resumed.restore(positions[at])
            for number in range(at + 1, 30):
                same(next(resumed), expected[number])
                assert resumed.left_out() == counts[number]


def test_bad_lines_end_the_run_unless_they_are_to_be_skipped(tmp_path):
    with pytest.raises(RunFileError, match=r"bad\.jsonl:\d+ "):
        made(with_bad_lines(tmp_path), 30)
    (tmp_path / "bad.jsonl").write_text("oops\n" * 50)
    data = write_jsonl(tmp_path / "none.jsonl", ["x"], streams=1, on_bad_line="skip")
    (tmp_path / "none.jsonl").write_text("oops\n" * 50)
    with pytest.raises(RunFileError, match=r"data\.path: stream 0 has no line that can be used"):
        made(data, 1)
