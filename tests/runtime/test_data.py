"""Data: every kind of file gives the tokens that were written, in an order of the seed alone, or is refused."""

from __future__ import annotations

import gzip
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octopipe.base.errors import OctoPipeError
from octopipe.cli import main
from octopipe.runtime.training.data.corpus import Corpus, Windows
from octopipe.runtime.training.data.opening import Reading, look, open_source, read
from octopipe.runtime.training.data.token_cache import Document, kept_corpus

VOCAB = 300


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTOPIPE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A word is a token; <eos> ends a document."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<eos>": 0, "<unk>": 1, **{f"w{i}": i + 2 for i in range(200)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "words" / "tokenizer.json"
    path.parent.mkdir()
    made.save(str(path))
    return path


def words(*ids: int) -> str:
    return " ".join(f"w{i}" for i in ids)


def jsonl(path: Path, *records: Any) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


# -- types of a .bin -----------------------------------------------------------------------------------


IDS = np.random.default_rng(0).integers(0, VOCAB, 4001)


@pytest.mark.parametrize("kind", ["uint16", "int32", "uint32", "int64"])
def test_a_stated_type_is_read_as_it_is(tmp_path: Path, kind: str) -> None:
    IDS.astype(kind).tofile(tmp_path / "t.bin")
    IDS.astype(kind).tofile(tmp_path / f"named.{kind}.bin")
    for corpus in (
        read(str(tmp_path / "t.bin"), Reading(dtype=kind), vocab=VOCAB),
        read(str(tmp_path / f"named.{kind}.bin"), Reading(), vocab=VOCAB),
    ):
        assert np.array_equal(corpus.tokens, IDS)


def test_an_unstated_type_is_found_only_where_one_alone_is_possible(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    IDS.astype("uint16").tofile(path)
    assert np.array_equal(read(str(path), Reading(), vocab=VOCAB).tokens, IDS)
    for kind, remedy in (("int32", "uint16 and as int32"), ("int64", "uint16 and as int32 and as int64")):
        IDS.astype(kind).tofile(path)
        with pytest.raises(OctoPipeError, match=f"{remedy}; say which it is: --data-dtype {kind}"):
            read(str(path), Reading(), vocab=VOCAB)
    # A vocabulary that 16 bits cannot hold.
    large = np.random.default_rng(0).integers(0, 100_000, 4001)
    large.astype("int32").tofile(path)
    assert np.array_equal(read(str(path), Reading(), vocab=100_000).tokens, large)
    IDS.astype("uint16").tofile(path)
    assert np.array_equal(read(str(path), Reading(), vocab=100_000).tokens, IDS)


@pytest.mark.parametrize("seed", range(8))
def test_wider_ids_are_never_read_as_narrower_ones(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([50, 1000, 50_257, 65_536, 128_256]))
    ids = rng.integers(0, int(rng.integers(1, vocab + 1)), int(rng.integers(1, 3000)))
    wide = str(rng.choice(["int32", "int64"]))
    ids.astype(wide).tofile(tmp_path / "t.bin")
    try:
        found = read(str(tmp_path / "t.bin"), Reading(), vocab=vocab).tokens
    except OctoPipeError as error:
        assert "--data-dtype" in str(error)
    else:
        assert np.array_equal(found, ids)


def test_a_type_that_contradicts_the_file_is_refused(tmp_path: Path) -> None:
    IDS.astype("int32").tofile(tmp_path / "t.int32.bin")
    np.save(tmp_path / "t.npy", IDS)
    for name in ("t.int32.bin", "t.npy"):
        with pytest.raises(OctoPipeError, match="leave"):
            look(str(tmp_path / name), Reading(dtype="uint16"))


@pytest.mark.parametrize("at", [0, 1999, 4000])
def test_an_id_outside_of_the_vocabulary_is_named_with_its_place(tmp_path: Path, at: int) -> None:
    ids = IDS.copy()
    ids[at] = VOCAB + 7
    np.save(tmp_path / "t.npy", ids)
    with pytest.raises(OctoPipeError, match=rf"t.npy: token 307 at position {at} is outside .* vocabulary of 300"):
        read(str(tmp_path / "t.npy"), Reading(), vocab=VOCAB)
    corpus = Corpus(where="t.npy", kind="npy", tokens=ids)
    samples = Windows(corpus, vocab=VOCAB, seq=10, seed=0)
    with pytest.raises(OctoPipeError, match=f"at position {at} "):  # every sample that is read is checked, too
        for number in range(samples.windows):
            samples.sample(number)


# -- Megatron ------------------------------------------------------------------------------------------


def megatron(stem: Path, documents: list[list[list[int]]], *, code: int = 4, dtype: str = "<i4") -> None:
    """Documents of sequences, as Megatron-LM's IndexedDatasetBuilder writes them."""
    sequences = [np.array(s, dtype) for document in documents for s in document]
    stem.with_suffix(".bin").write_bytes(b"".join(s.tobytes() for s in sequences))
    sizes = np.array([s.size for s in sequences], "<i4")
    pointers = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype("<i8") * np.dtype(dtype).itemsize
    firsts = np.concatenate([[0], np.cumsum([len(d) for d in documents])]).astype("<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, sizes.size, firsts.size)
    stem.with_suffix(".idx").write_bytes(header + sizes.tobytes() + pointers.tobytes() + firsts.tobytes())


def test_a_megatron_set_gives_tokens_and_documents_whichever_file_names_it(tmp_path: Path) -> None:
    documents = [[[1, 2, 3], [4]], [[5, 6]], [[7, 8, 9, 10]]]
    for code, dtype in ((4, "<i4"), (8, "<u2"), (5, "<i8")):
        megatron(tmp_path / "set", documents, code=code, dtype=dtype)
        for name in ("set", "set.bin", "set.idx"):
            corpus = read(str(tmp_path / name), Reading(), vocab=11)
            assert corpus.tokens.tolist() == list(range(1, 11))
            assert corpus.starts is not None and corpus.starts.tolist() == [0, 4, 6]


def test_megatrons_own_writer_and_our_reader_agree(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    import torch

    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "set.bin"), dtype=np.uint16)
    rng = np.random.default_rng(0)
    written = [rng.integers(0, 60_000, rng.integers(1, 40)) for _ in range(30)]
    for document in written:
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "set.idx"))
    corpus = read(str(tmp_path / "set"), Reading(), vocab=60_000)
    assert corpus.tokens.tolist() == np.concatenate(written).tolist()
    assert corpus.starts is not None
    assert corpus.starts.tolist() == np.cumsum([0, *(d.size for d in written)])[:-1].tolist()


@pytest.mark.parametrize("damage", ["cut", "magic", "size", "pointers", "documents", "alone"])
def test_a_damaged_megatron_set_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    stem = tmp_path / "set"
    megatron(stem, [[[1, 2, 3]], [[4, 5]]])
    index = bytearray(stem.with_suffix(".idx").read_bytes())
    if damage == "cut":
        index = index[:-9]
    elif damage == "magic":
        index[0] = 0
    elif damage == "pointers":
        index[34 + 8 + 8] = 1
    elif damage == "documents":
        index[-8] = 77
    elif damage == "size":
        stem.with_suffix(".bin").write_bytes(b"\x01\x00\x00\x00")
    if damage == "alone":
        stem.with_suffix(".bin").unlink()
    stem.with_suffix(".idx").write_bytes(index)
    with pytest.raises(OctoPipeError) as caught:
        read(str(stem.with_suffix(".idx")), Reading(), vocab=10)
    assert "set." in str(caught.value) and "\n" not in str(caught.value)


# -- text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_text_becomes_documents_with_an_end(tmp_path: Path, tokenizer: Path, name: str) -> None:
    path = jsonl(tmp_path / name, {"text": words(1, 2), "id": 7}, {"text": words(3)}, {"text": ""})
    corpus = read(str(path), Reading(tokenizer=str(tokenizer)), vocab=VOCAB)
    assert corpus.tokens.tolist() == [3, 4, 0, 5, 0]
    assert corpus.starts is not None and corpus.starts.tolist() == [0, 3] and corpus.counted is None
    again = read(str(path), Reading(tokenizer=str(tokenizer.parent)), vocab=VOCAB)  # the folder, and from the cache
    assert again.tokens.tolist() == corpus.tokens.tolist()
    jsonl(path, {"text": words(9, 9, 9)})
    assert read(str(path), Reading(tokenizer=str(tokenizer)), vocab=VOCAB).tokens.tolist() == [11, 11, 11, 0]


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "w1 w2"}\r\n{"text": "w3"}\r\n')
    assert read(str(path), Reading(tokenizer=str(tokenizer)), vocab=VOCAB).tokens.tolist() == [3, 4, 0, 5, 0]


def test_a_named_pipe_is_not_waited_for(tmp_path: Path, tokenizer: Path) -> None:
    os.mkfifo(tmp_path / "t.jsonl")
    with pytest.raises(OctoPipeError, match=r"t\.jsonl: not a regular file; check --data"):
        read(str(tmp_path / "t.jsonl"), Reading(tokenizer=str(tokenizer)), vocab=VOCAB)


def test_without_a_folder_of_ones_own_no_tokens_are_kept_where_others_write(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octopipe.runtime.training.data.token_cache.cache_folder", lambda: None)
    path = jsonl(tmp_path / "t.jsonl", {"text": words(1)})
    with pytest.raises(OctoPipeError, match="belongs to this user alone; set OCTOPIPE_CACHE_DIR"):
        read(str(path), Reading(tokenizer=str(tokenizer)), vocab=VOCAB)


@pytest.mark.parametrize("wrong", [-1, 1 << 31])
def test_an_id_outside_of_int32_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    monkeypatch.setattr("octopipe.runtime.training.data.token_cache.cache_folder", lambda: tmp_path)
    with pytest.raises(OctoPipeError, match=f"document 2 holds {wrong}, which is not a token id; write ids from 0"):
        kept_corpus(
            wrong, lambda: [Document([1, 2]), Document([3, wrong])], where="t", kind="text", whole=False,
            tell=lambda words: None,
        )  # fmt: skip


def test_of_a_prompt_and_its_completion_only_the_completion_counts(tmp_path: Path, tokenizer: Path) -> None:
    records = [{"prompt": words(1, 2, 3), "completion": words(k, k)} for k in (10, 20, 30)]
    path = jsonl(tmp_path / "t.jsonl", *records, {"prompt": words(*range(40)), "completion": words(1)})
    corpus = read(str(path), Reading(tokenizer=str(tokenizer)), vocab=VOCAB)
    samples = Windows(corpus, vocab=VOCAB, seq=12, seed=0, apart=True, shuffle=False)
    # Two of six tokens fit thirteen places; the long prompt leaves no target in its sample, which is left out.
    assert samples.windows == 2 and samples.cut == 1
    assert samples.sample(0).tolist() == [3, 4, 5, 12, 12, 0, 3, 4, 5, 22, 22, 0, 0]
    marks = samples.marks(0)
    assert marks is not None and marks.positions is not None
    assert marks.counted.tolist() == [False, False, True, True, True, False, False, False, True, True, True, False]
    assert marks.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert samples.sample(1).tolist() == [3, 4, 5, 32, 32, 0, *[0] * 7]
    marks = samples.marks(1)
    assert marks is not None and marks.counted.tolist() == [False, False, True, True, True, *[False] * 7]


@pytest.mark.parametrize(
    ("lines", "remedy"),
    [
        ("", "no record"),
        ("{", "line 1: not valid JSON"),
        ("[1]", "line 1: this JSON value is not an object"),
        ('{"body": "x"}', "--text-key"),
        ('{"messages": []}', "prompt and completion"),
        ('{"text": 3}', "line 1: 'text' is a value of type int, not text; write a string"),
        ('{"text": null}', "line 1: 'text' is null, not text"),
        ('{"text": "w1"}\n\n{"text": "w1"}\n{"txt": "w1"}', "line 4: 'text' is missing; this record has txt"),
        ('{"text": "w1"}\n{"text": "\udcff"}', "line 2: not UTF-8"),
        ('{"text": "w1"}\n{"text"', "line 2: not valid JSON .*; write one JSON object per line"),
        ("\udcff\udcfe{\0", "line 1: not UTF-8; save the file as UTF-8"),
        ('{\0"\0t\0', "line 1: zero bytes in it, as in UTF-16; save the file as UTF-8"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, tokenizer: Path, lines: str, remedy: str) -> None:
    (tmp_path / "t.jsonl").write_bytes(lines.encode(errors="surrogateescape"))
    with pytest.raises(OctoPipeError, match=remedy) as caught:
        read(str(tmp_path / "t.jsonl"), Reading(tokenizer=str(tokenizer)), vocab=VOCAB)
    assert "t.jsonl" in str(caught.value) and "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", {"text": words(1)})
    with pytest.raises(OctoPipeError, match="202 tokens, the model a vocabulary of 100"):
        read(str(path), Reading(tokenizer=str(tokenizer)), vocab=100)


# -- Hugging Face datasets -----------------------------------------------------------------------------


def test_a_saved_dataset_is_read_by_its_columns(tmp_path: Path, tokenizer: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": [[1, 2, 3], [4, 5]], "labels": [[-100, 2, 3], [4, 5]]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "ready")
    corpus = read(str(tmp_path / "ready"), Reading(), vocab=VOCAB)
    assert corpus.tokens.tolist() == [1, 2, 3, 4, 5] and corpus.counted is not None
    assert corpus.counted.tolist() == [0, 1, 1, 1, 1]
    text = datasets.Dataset.from_dict({"body": [words(1), words(2, 3)]})
    text.save_to_disk(tmp_path / "text")
    with pytest.raises(OctoPipeError, match="--text-key"):
        look(str(tmp_path / "text"), Reading(tokenizer=str(tokenizer)))
    with pytest.raises(OctoPipeError, match="--tokenizer"):
        look(str(tmp_path / "text"), Reading(text_key="body"))
    corpus = read(str(tmp_path / "text"), Reading(tokenizer=str(tokenizer), text_key="body"), vocab=VOCAB)
    assert corpus.tokens.tolist() == [3, 0, 4, 5, 0]
    datasets.DatasetDict({"train": text, "test": text}).save_to_disk(tmp_path / "both")
    with pytest.raises(OctoPipeError, match=r"both/test, .*both/train"):
        look(str(tmp_path / "both"), Reading(tokenizer=str(tokenizer), text_key="body"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(OctoPipeError, match="save_to_disk"):
        look(str(tmp_path / "empty"), Reading())


def test_without_the_library_a_saved_dataset_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in ("dataset_info.json", "state.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OctoPipeError, match=r'pip install "octopipe\[train\]"'):
        look(str(tmp_path), Reading())


# -- order ---------------------------------------------------------------------------------------------


def test_documents_that_are_kept_apart_are_those_of_a_plain_walk(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 9, 60)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    tokens = rng.integers(0, VOCAB, int(lengths.sum()))
    corpus = Corpus(where="t", kind="test", tokens=tokens, starts=starts.astype(np.int64))
    samples = Windows(corpus, vocab=VOCAB, seq=7, seed=0, apart=True, shuffle=False)
    begins = {*starts.tolist()}
    for number in range(samples.windows):
        first = 7 * number
        marks = samples.marks(number)
        assert marks is not None and marks.positions is not None
        position, wanted = 0, []
        for at in range(first, first + 7):
            position = 0 if at in begins or at == first else position + 1
            wanted.append(position)
        assert marks.positions.tolist() == wanted
        assert marks.counted.tolist() == [at not in begins for at in range(first + 1, first + 8)]


def test_samples_without_a_target_that_counts_are_left_out() -> None:
    starts = np.array([0, 4, 5, 6, 7, 8, 9], np.int64)
    corpus = Corpus(where="t", kind="test", tokens=np.arange(17), starts=starts)
    samples = Windows(corpus, vocab=17, seq=4, seed=0, apart=True, shuffle=False)
    assert [int(samples.sample(k)[0]) for k in range(samples.windows)] == [
        0,
        8,
        12,
    ]


# -- the command line ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "flags", "remedy"),
    [
        ("t.bin", IDS.astype("<i4").tobytes(), (), "--data-dtype int32"),
        ("t.txt", b"hello", (), "not a supported kind of data"),
        ("t.jsonl", b'{"text": "x"}\n', (), "--tokenizer PATH"),
        ("t.jsonl", b'{"text": "x"}\n', ("--tokenizer", "/no/such"), "no tokenizer.json"),
        ("t.bin", b"abc", (), "no whole number"),
        ("t.npy", b"abc", (), "cannot be read"),
        ("t.bin", IDS.astype("<u2").tobytes(), ("--document-mask",), "does not state where documents begin"),
    ],
)
def test_bad_data_is_one_line_before_any_rank_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes,
    flags: tuple[str, ...],
    remedy: str,
) -> None:
    pytest.importorskip("torch")
    from octopipe.runtime.ranks import launch

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "run_ranks", started)
    (tmp_path / name).write_bytes(content)
    small = ("nemotron-h-8b", "--scale", "0.005", "--layers", "6", "--seq", "16", "--no-measure", "--nproc", "1")
    assert main(["train", *small, "--data", str(tmp_path / name), *flags]) == 2
    err = capsys.readouterr().err
    assert remedy in err and len(err.strip().splitlines()) == 1


def test_a_path_that_is_not_there_is_found_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from octopipe.cli import main\n"
        f"sys.exit(main(['train', 'nemotron-h-8b', '--data', {str(tmp_path / 'no.bin')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "no such file" in done.stderr


def test_open_source_without_a_path_is_made_up_text() -> None:
    source = open_source(None, vocab=64, seq=8, seed=0)
    assert source.sample(3).shape == (9,) and source.marks(3) is None
