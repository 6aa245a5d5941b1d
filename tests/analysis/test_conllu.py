"""CoNLL-U: what counts as a word, and where a damaged file is damaged."""

from collections import Counter

import pytest

from allattn.analysis.conllu import Word, read_conllu


def line(number, form, head, relation):
    return "\t".join([str(number), form, "_", "_", "_", "_", str(head), relation, "_", "_"])


TWO = "\n".join([
    "# text = She didn't sleep",
    line(1, "She", 4, "nsubj"),
    line("2-3", "didn't", "_", "_"),
    line(2, "did", 4, "aux"),
    line(3, "n't", 4, "advmod"),
    line("3.1", "really", "_", "_"),
    line(4, "sleep", 0, "root"),
    "",
    "# newpar",
    line(1, "Rain\u2028fell", 0, "root"),
    "",
])  # fmt: skip
WORDS = [
    [
        Word("She", 3, "nsubj"),
        Word("did", 3, "aux"),
        Word("n't", 3, "advmod"),
        Word("sleep", None, "root"),
    ],
    [Word("Rain\u2028fell", None, "root")],
]


@pytest.mark.parametrize(
    "text",
    [TWO, TWO + "\n\n\n", TWO.rstrip("\n"), "\ufeff" + TWO, TWO.replace("\n", "\r\n"),
     "# alone\n\n" + TWO],
    ids=["plain", "blank lines", "no last line end", "byte order mark", "crlf", "comment alone"],
)  # fmt: skip
def test_multiword_tokens_and_empty_nodes_are_no_words(tmp_path, text):
    (tmp_path / "a.conllu").write_bytes(text.encode())
    assert read_conllu(tmp_path / "a.conllu") == WORDS


@pytest.mark.parametrize(
    ("replaced", "by", "number", "wrong"),
    [
        ("aux\t_\t_", "aux\t_", 4, "9 columns"),
        (line(3, "n't", 4, "advmod"), line(4, "n't", 4, "advmod"), 5, "word 4 where word 3"),
        ("3.1\t", "3.x\t", 6, "'3.x' is no word number"),
        ("sleep\t_", "\t_", 7, "'' is no word form"),
        ("_\t4\taux", "_\t_\taux", 4, "'_' is no head"),
        ("_\t4\taux", "_\t-1\taux", 4, "'-1' is no head"),
        ("_\t4\tadvmod", "_\t5\tadvmod", 5, "head 5 of 4 words"),
        ("_\t4\tadvmod", "_\t3\tadvmod", 5, "head 3 is the word itself"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, replaced, by, number, wrong):
    path = tmp_path / "a.conllu"
    assert replaced in TWO
    path.write_text(TWO.replace(replaced, by), encoding="utf-8")
    with pytest.raises(ValueError, match=wrong) as raised:
        read_conllu(path)
    assert str(raised.value).startswith(f"{path}, line {number}: ")
    assert "\n" not in str(raised.value)


def test_heads_that_go_in_a_circle_are_refused(tmp_path):
    path = tmp_path / "a.conllu"
    rows = [line(1, "a", 2, "x"), line(2, "b", 3, "x"), line(3, "c", 4, "x"), line(4, "d", 3, "x")]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 3: word 3 hangs, over its heads, from itself"):
        read_conllu(path)


def test_what_is_no_conllu_at_all(tmp_path):
    path = tmp_path / "a.conllu"
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_conllu(path)
    path.write_text("# only a comment\n")
    with pytest.raises(ValueError, match="no sentence"):
        read_conllu(path)
    path.write_bytes(b"# one\n# tw\xff\n")
    with pytest.raises(ValueError, match="line 2: not UTF-8"):
        read_conllu(path)


def test_the_treebank_has_its_known_counts(shared_data):
    # counted with awk: sentences, words, and of each relation those whose head is to the left
    sentences = read_conllu(shared_data / "ud" / "en_ewt-ud-dev.conllu")
    assert (len(sentences), sum(map(len, sentences))) == (2001, 25147)
    counts = Counter(
        (word.relation.partition(":")[0], word.head < i)
        for sentence in sentences
        for i, word in enumerate(sentence)
        if word.head is not None
    )
    expected = {"nsubj": (90, 2047), "obj": (1155, 56), "amod": (23, 1303), "advmod": (331, 1022)}
    for relation, (left, right) in expected.items():
        assert (counts[relation, True], counts[relation, False]) == (left, right)
