"""Syntactic heads: hand counts, planted heads, an oracle in loops, and the words' pieces."""

from collections import Counter

import pytest
import torch

from allattn.analysis.conllu import Word, read_conllu
from allattn.analysis.syntax import BAR_PERCENT, KINDS, pieces_of_words, syntactic_heads
from allattn.data.tokenizers import ByteTokenizer, WordTokenizer, load_tokenizer
from allattn.model.positions import sinusoids
from allattn.model.transformer import TransformerLM, watched

WORD = WordTokenizer("<eos> <unk> dog verb the big now".split())


def sentence(text):
    """Words as form/head/relation, heads from 1."""
    parts = [word.split("/") for word in text.split()]
    return [Word(form, int(head) - 1 if int(head) else None, rel) for form, head, rel in parts]


SENTENCES = [
    sentence("the/2/det dog/3/nsubj verb/0/root"),
    sentence("dog/2/nsubj:pass verb/0/root the/5/det big/5/amod dog/2/obj"),
    sentence("the/2/det dog/4/nsubj now/4/advmod verb/0/root"),
    sentence("dog/4/nsubj now/4/advmod now/4/advmod verb/0/root the/6/det dog/4/dobj"),
]
# by relation and direction: relations seen, left out, baseline offset and how many are there
BY_HAND = {
    "nsubj d->h": (0, 4, None, None),
    "nsubj h->d": (4, 0, -1, 2 / 4),
    "obj d->h": (2, 0, -2, 1 / 2),
    "obj h->d": (0, 2, None, None),
    "amod d->h": (0, 1, None, None),
    "amod h->d": (1, 0, -1, 1.0),
    "advmod d->h": (0, 3, None, None),
    "advmod h->d": (3, 0, -1, 2 / 3),
}


@pytest.fixture
def planted(tiny_config):
    """Layer 0, head 0 looks at the token before; head 1 from a verb at a dog; head 2 anywhere."""
    config = tiny_config(
        vocab_size=WORD.vocab_size, n_layers=1, n_heads=3, d_head=2, seq_len=16, mem_len=16
    )
    model = TransformerLM(config).double().eval()
    attention = model.layers[0].attention
    with torch.no_grad():
        model.vocabulary.embedding.copy_(torch.eye(config.vocab_size, config.d_model) * 9)
        for parameter in attention.parameters():
            parameter.zero_()
        distance = torch.tensor([1.0])
        attention.position.weight[0] = sinusoids(distance, config.d_model, torch.float64)[0] * 9
        attention.position_bias[0, 0] = 9.0
        attention.query.weight[2, WORD.ids["verb"]] = 3.0
        attention.key.weight[2, WORD.ids["dog"]] = 3.0
    return model


def test_counts_and_planted_heads_by_hand(planted):
    done = []
    view = syntactic_heads(planted, WORD, SENTENCES, batch_size=3, on_sentences=done.append)
    assert {v.name: (v.n, v.to_the_right, v.offset, v.baseline) for v in view.relations} == BY_HAND
    assert all(v.out_of_reach == v.unmapped == 0 for v in view.relations)
    assert (view.sentences, view.unmapped_sentences, sum(done)) == (4, 0, 4)
    accuracy = {v.name: v.accuracy for v in view.relations}
    assert accuracy["nsubj d->h"] is None
    # the token before: exactly the relations at offset -1
    assert accuracy["nsubj h->d"][0][0] == 2 / 4
    assert accuracy["obj d->h"][0][0] == 0
    assert accuracy["amod h->d"][0][0] == 1
    assert accuracy["advmod h->d"][0][0] == 2 / 3
    # from the verb to the only dog on its left, wherever that is
    assert accuracy["nsubj h->d"][0][1] == 1
    assert accuracy["advmod h->d"][0][1] == 0
    assert [row[:2] for row in view.roles] == [[[], ["nsubj h->d"]]]


def test_a_head_at_the_bar_is_syntactic(planted):
    """11 of 20 at offset -1; the planted head finds 13 of 20, then 12: 10 points, then 5."""
    near = sentence("dog/2/nsubj verb/0/root")
    far = sentence("dog/3/nsubj now/3/det verb/0/root")
    two_dogs = sentence("now/3/nsubj dog/3/det verb/0/root")
    for missed, is_syntactic in ((7, True), (8, False)):
        given = [near] * 11 + [far] * (9 - missed) + [two_dogs] * missed
        view = syntactic_heads(planted, WORD, given)
        nsubj = view.relations[KINDS.index(("nsubj", "h->d"))]
        assert (nsubj.n, nsubj.offset, nsubj.baseline) == (20, -1, 11 / 20)
        assert nsubj.accuracy[0][1] == (20 - missed) / 20
        assert ("nsubj h->d" in view.roles[0][1]) is is_syntactic
    assert BAR_PERCENT == 10


def test_the_line_end_and_persistent_vectors_do_not_count(planted):
    attention = planted.layers[0].attention
    with torch.no_grad():  # head 1 prefers the line end, then a persistent vector, by far
        attention.key.weight[2, WORD.eos_id] = 30.0
        attention.persistent_key[1] = torch.tensor([50.0, 0.0])
    view = syntactic_heads(planted, WORD, SENTENCES)
    assert view.relations[KINDS.index(("nsubj", "h->d"))].accuracy[0][1] == 1


def oracle(model, tokenizer, sentences):
    """Counts of seen, out of reach and hits, by loops over one sentence at a time."""
    T, mem, N = model.config.seq_len, model.config.mem_len, model.config.heads
    seen, lost, hits = Counter(), Counter(), Counter()
    for words in sentences:
        spans, ids = [], [tokenizer.eos_id]
        for i, word in enumerate(words):
            new = tokenizer.encode(word.form if i == 0 else f" {word.form}")
            spans.append((len(ids), len(ids) + len(new)))
            ids += new
        weights = {}  # layer, head, query, key
        memory = None
        for start in range(0, len(ids), T):
            segment = torch.tensor([ids[start : start + T]])
            M = min(mem, start)

            def watch(layer, w, weights=weights, start=start, M=M, n=segment.shape[1]):
                for h in range(w.shape[1]):
                    for t in range(n):
                        for s in range(M + n):
                            weights[layer, h, start + t, start - M + s] = w[0, h, t, s].item()
                return w

            with torch.no_grad(), watched(model, watch):
                memory = model(segment, memory=memory).memory
        for i, word in enumerate(words):
            relation = word.relation.split(":")[0].replace("dobj", "obj")
            if word.head is None or relation not in ("nsubj", "obj", "amod", "advmod"):
                continue
            pairs = {"d->h": (i, word.head), "h->d": (word.head, i)}
            direction = "d->h" if word.head < i else "h->d"
            one, other = pairs[direction]
            name, query = f"{relation} {direction}", spans[one][1] - 1
            reach = {s for (_, _, q, s), w in weights.items() if q == query and w > 0}
            if not reach & set(range(*spans[other])):
                lost[name] += 1
                continue
            seen[name] += 1
            for layer, n in enumerate(N):
                for h in range(n):
                    of_query = {
                        s: w
                        for (la, hd, q, s), w in weights.items()
                        if (la, hd, q) == (layer, h, query) and ids[s] != tokenizer.eos_id
                    }
                    best = max(of_query, key=of_query.get)
                    hits[name, layer, h] += spans[other][0] <= best < spans[other][1]
    return seen, lost, hits


@pytest.mark.parametrize("same_length", [False, True])
@pytest.mark.parametrize("family", [{}, {"n_persistent": 0, "d_ff": 7}], ids=["allattn", "txl"])
def test_against_loops_whatever_the_batch_size(tiny_model, family, same_length):
    """Sub-words, sentences of several segments, layers without heads, words out of reach."""
    tokenizer = ByteTokenizer()
    model = tiny_model(
        vocab_size=256, n_layers=3, n_heads=[2, 0, 1], same_length=same_length, **family
    )
    short = "a/2/amod b/0/root c/2/obj d/3/advmod e/3/amod f/4/nsubj g/5/obj h/6/advmod i/7/obj"
    sentences = [*SENTENCES, sentence("é/0/root a/1/obj b/1/advmod"), sentence("x/0/root")]
    sentences += [sentence(short), sentence(short[: short.index(" h")])]
    seen, lost, hits = oracle(model, tokenizer, sentences)
    assert sum(lost.values()) > 0 and sum(hits.values()) > 0
    views = [syntactic_heads(model, tokenizer, sentences, batch_size=n) for n in (1, 4, 50)]
    assert views[0] == views[1] == views[2]
    for v in views[0].relations:
        assert (v.n, v.out_of_reach) == (seen[v.name], lost[v.name])
        if v.n:
            shape = [len(row) for row in v.accuracy]
            assert shape == [2, 0, 1]
            for layer, row in enumerate(v.accuracy):
                assert row == [hits[v.name, layer, h] / v.n for h in range(len(row))]


def test_pieces_of_words(tiny_corpus):
    pieces = load_tokenizer(tiny_corpus)
    forms = ["unbelievable", "né", "\u2581x", "!", "日本"]
    for tokenizer in (ByteTokenizer(), WORD, pieces):
        ids, places = pieces_of_words(tokenizer, forms)
        assert ids == tokenizer.encode("unbelievable né \u2581x ! 日本")
        assert [p.start for p in places] == [0, *(p.stop for p in places[:-1])]
        assert places[-1].stop == len(ids)
        if tokenizer is not WORD:
            spelled = [tokenizer.decode(ids[p.start : p.stop]) for p in places]
            assert spelled == ["unbelievable", " né", " \u2581x", " !", " 日本"]
    assert [len(p) for p in pieces_of_words(WORD, forms)[1]] == [1] * 5


class TwoLetters(ByteTokenizer):
    """A tokenizer with one piece for "b c", so across two words."""

    def _encode(self, text):
        return list(text.replace("b c", "\x01").encode())


def test_what_cannot_be_mapped_is_left_out_and_said(tiny_model):
    model = tiny_model(vocab_size=256, seq_len=16)
    whole = sentence("b/2/nsubj a/0/root")
    split = sentence("b/2/nsubj c/0/root")
    assert pieces_of_words(TwoLetters(), ["b", "c"]) is None
    view = syntactic_heads(model, TwoLetters(), [whole, split, split])
    nsubj = view.relations[KINDS.index(("nsubj", "h->d"))]
    assert (nsubj.n, nsubj.unmapped, view.unmapped_sentences) == (1, 2, 2)
    # a form of nothing but a space of another kind is no word to the word tokenizer
    empty = [Word("\u00a0", 1, "nsubj"), Word("dog", None, "root")]
    view = syntactic_heads(tiny_model(vocab_size=WORD.vocab_size), WORD, [empty])
    assert (view.relations[1].n, view.relations[1].unmapped, view.unmapped_sentences) == (0, 1, 0)


def test_the_treebank_in_sentencepiece(tiny_corpus, shared_data):
    """Word by word or as a whole line, the pieces are the same in every real sentence."""
    tokenizer = load_tokenizer(tiny_corpus)
    sentences = read_conllu(shared_data / "ud" / "en_ewt-ud-dev.conllu")[::10]
    for words in sentences:
        ids, places = pieces_of_words(tokenizer, [word.form for word in words])
        assert all(places) and places[-1].stop == len(ids)
        for word, place in zip(words, places, strict=True):
            assert tokenizer.decode(ids[place.start : place.stop]).removeprefix(" ") == word.form
