"""BannedTexts against brute force: exactly the tokens that complete a word are banned."""

import gc
import random
import re
import threading
import tracemalloc
import weakref

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gptmanager import GptManager, InferenceRequest, ModelType
from gptmanager.callbacks import BannedTexts, load_tokenizer
from gptmanager.callbacks.processors import banned_texts
from gptmanager.callbacks.processors.token_bytes import token_bytes
from gptmanager.errors import CapacityError, ConfigError
from gptmanager.testing import RecordingCallbacks, ScriptedModel

MODEL = "examples/tiny_llama"
# transformers' table, which is the definition
_BYTE_LETTERS = [bytes_to_unicode()[byte] for byte in range(256)]


def banned_after(processor, history, vocab_size):
    logits = torch.zeros(1, 1, vocab_size)
    processor(0, logits, [history], None, None)
    return {token for token in range(vocab_size) if logits[0, 0, token] == -torch.inf}


def byte_level(pieces, special=("<|end|>",)):
    """A vocabulary of any byte strings, which no merges have to reach."""
    letters = dict(zip(range(256), _BYTE_LETTERS, strict=True))
    vocabulary = {"".join(letters[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


def pieces_of(rng, alphabet):
    found = {bytes([byte]) for byte in alphabet}
    while len(found) < 60:
        found.add(bytes(rng.choices(alphabet, k=rng.randint(1, 5))))
    return sorted(found, key=lambda piece: rng.random())


@pytest.mark.parametrize("seed", range(30))
def test_exactly_the_tokens_that_complete_a_word_are_banned(seed):
    rng = random.Random(seed)
    text = ("abc", "aé", "a 日")[seed % 3]  # few letters, so that words meet; or bytes of letters
    pieces = pieces_of(rng, sorted(set(text.encode())))
    tokenizer = byte_level(pieces)
    words = ["".join(rng.choices(text, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))]
    processor = BannedTexts(tokenizer).bind(words)
    of_id = token_bytes(tokenizer)
    assert of_id == [*pieces, b""]
    history = rng.choices(range(len(of_id)), k=3)
    prompt_bytes = len(b"".join(of_id[token] for token in history))
    for _ in range(25):
        banned = banned_after(processor, history, len(of_id))
        before = b"".join(of_id[token] for token in history)
        expected = {
            token
            for token, piece in enumerate(of_id)
            if piece and any(ends_behind(before, piece, word.encode()) for word in words)
        }
        assert banned == expected, (words, before)
        allowed = sorted(set(range(len(of_id))) - banned)
        history.append(rng.choice(allowed))
    whole = b"".join(of_id[token] for token in history)
    for word in (word.encode() for word in words):  # the prompt may have held one
        assert word not in whole[max(0, prompt_bytes - len(word) + 1) :]


def ends_behind(before, piece, word):
    at = (before + piece).rfind(word)
    return at >= 0 and at + len(word) > len(before)


def test_a_model_does_not_get_to_say_a_word():
    tokenizer = load_tokenizer(MODEL)
    script = tokenizer.encode(" The red ball and the red box.").ids
    prompt = tokenizer.encode("Tom had").ids

    def next_token(history):
        done = len(history) - len(prompt)
        return script[done] if done < len(script) else 0

    texts = BannedTexts(tokenizer)
    requests = [
        InferenceRequest.from_tokens(i, prompt, 20, end_id=0, logits_post_processor=processor)
        for i, processor in enumerate([None, texts.bind(["red b", "and"]), texts.bind([" The"])])
    ]
    host = RecordingCallbacks(requests)
    model = ScriptedModel(next_token, vocab_size=640)
    with GptManager(model, ModelType.INFLIGHT_FUSED_BATCHING, **host.keywords()) as manager:
        assert manager.wait_idle(30)
    plain, words, first = (tokenizer.decode(host.output(i)) for i in range(3))
    assert plain == "Tom had The red ball and the red box."
    assert (words, first) == ("Tom had The red", "Tom had"), "the other tokens are equal: it ends"


def test_a_word_that_the_prompt_begins_is_not_completed():
    tokenizer = byte_level([b"ber", b"lin", b"li", b"n"])
    processor = BannedTexts(tokenizer).bind(["berlin"])
    assert banned_after(processor, [0], 5) == {1}
    assert banned_after(processor, [0, 2], 5) == {3}
    assert banned_after(processor, [0, 4, 2], 5) == {3}, "a special token is no text"
    assert banned_after(processor, [2], 5) == banned_after(processor, [99, 2], 5) == set()


def test_a_word_that_begins_within_itself():
    processor = BannedTexts(byte_level([b"ab", b"c", b"abc"])).bind(["abababc"])
    assert banned_after(processor, [0, 0], 4) == {2}
    assert banned_after(processor, [0, 0, 0], 4) == banned_after(processor, [0] * 9, 4) == {1, 2}


def test_a_narrow_model_and_beams():
    tokenizer = byte_level([b"a", b"b", b"ab"])
    processor = BannedTexts(tokenizer).bind(["ab"])
    assert banned_after(processor, [0], 2) == {1}
    logits = torch.zeros(1, 2, 6)
    processor(0, logits, [[0], [1]], None, None)
    assert (logits[0] == -torch.inf).nonzero().tolist() == [[0, 1], [0, 2], [1, 2]]


def test_states_are_looked_up_once_and_their_memory_is_bounded(monkeypatch):
    tokenizer = byte_level([b"a", b"b", b"c", b"ab", b"bc", b"abc"])
    states = BannedTexts(tokenizer).bind(["abc"]).prepare("cpu").result()
    cpu = torch.device("cpu")
    a, ab = states.state([0]), states.state([2, 0, 1])
    first = states.banned(a, 7, cpu)
    assert states.banned(a, 7, cpu) is first and first.dtype == torch.int64
    assert first.tolist() == [4, 5]
    monkeypatch.setattr(banned_texts, "_MAX_CACHED", 3)
    assert states.banned(ab, 7, cpu).tolist() == [2, 5]
    assert states.banned(a, 7, cpu) is not first


def test_a_state_that_is_looked_up_by_two_threads_counts_once(monkeypatch):
    monkeypatch.setattr(banned_texts, "_MAX_CACHED", 8)
    cache, ids = banned_texts._IdCache(), torch.tensor([1, 2])
    for key in ("a", "a", "b"):  # 3 and 3
        cache.add(key, ids)
    assert cache.get("a") is ids and cache.get("b") is ids


def test_equal_words_are_shared_and_wrong_ones_refused():
    texts = BannedTexts(byte_level([b"a"]), max_word_lists=2)
    first = texts.bind(["x", "y"])
    assert texts.bind(["y", "x", "x"]) is first
    texts.bind(["1"])
    assert texts.bind(["x", "y"]) is first
    texts.bind(["2"])  # takes the place of "1", which was used least recently
    assert texts.bind(["x", "y"]) is first
    texts.bind(["3"])
    texts.bind(["4"])
    assert texts.bind(["x", "y"]) is not first
    uncached = BannedTexts(byte_level([b"a"]), max_word_lists=0)
    assert uncached.bind(["x"]) is not uncached.bind(["x"])
    for wrong, error in (([], ValueError), (["a", ""], ValueError), ("abc", TypeError)):
        with pytest.raises(error, match="words"):
            texts.bind(wrong)


def test_the_vocabulary_is_read_once(monkeypatch):
    readings, read = [], banned_texts.token_bytes

    def counting(tokenizer):
        readings.append(tokenizer)
        return read(tokenizer)

    monkeypatch.setattr(banned_texts, "token_bytes", counting)
    texts = BannedTexts(byte_level([b"a"]))
    for word in ("x", "y"):
        texts.bind([word]).prepare("cpu").result(20)
    assert len(readings) == 1


def test_the_lists_that_all_requests_use_are_bounded(monkeypatch):
    monkeypatch.setattr(banned_texts, "_MAX_SIZE", 300 * banned_texts._STATE_SIZE)
    texts = BannedTexts(byte_level([b"a"]))
    used, kept = texts.bind(["a" * 150]), weakref.ref(texts.bind(["b" * 50]))
    assert texts.bind(["a" * 150]) is used and kept() is not None
    texts.bind(["c" * 120])
    assert kept() is None, "what is only kept for other requests makes room"
    with pytest.raises(CapacityError, match="that all requests ban would take"):
        texts.bind(["d" * 151])
    del used
    assert texts.bind(["d" * 151])


@pytest.mark.parametrize(
    "words, told",
    [
        (["a"] * 1025, "words: 1025 are given, at most 1024 are allowed"),
        (["b", "a" * 257], "words[1] has 257 characters, at most 256 are allowed"),
        (
            ["\u65e5" * 256] * 33,
            "words: 8448 characters are given, at most 8192 are allowed in all",
        ),
    ],
)
def test_words_that_would_take_too_much_memory_are_refused(words, told):
    texts = BannedTexts(byte_level([b"a"]))
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        texts.bind(words)
    assert texts.bind(["\u65e5" * 256] * 32).prepare("cpu").result(20)


def test_no_word_is_read_if_there_are_too_many():
    words = Counted(["a"] * 10**6)
    with pytest.raises(ValueError, match="1000000 are given"):
        BannedTexts(byte_level([b"a"])).bind(words)
    assert words.num_read == 0


class Counted(list):
    """A list that counts how many of its items are read."""

    num_read = 0

    def __iter__(self):
        for item in super().__iter__():
            self.num_read += 1
            yield item


def test_the_most_words_take_little_memory():
    longest = ["".join(map(chr, range(i * 256 + 0x4E00, i * 256 + 0x4F00))) for i in range(32)]
    texts = BannedTexts(byte_level([b"a"]))
    tracemalloc.start()
    texts.bind(longest).prepare("cpu").result(20)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < banned_texts._size(longest) and peak < 8 << 20


def test_a_tokenizer_s_lists_end_with_it():
    texts = BannedTexts(byte_level([b"a"]))
    words = weakref.ref(texts.bind(["ab"]))
    words().prepare("cpu").result(20)
    texts._lists.get()._threads.shutdown()
    del texts
    gc.collect()
    assert words() is None


def test_letters_of_any_script_count_by_their_bytes(monkeypatch):
    monkeypatch.setattr(banned_texts, "_MAX_SIZE", 450 * banned_texts._STATE_SIZE)
    texts = BannedTexts(byte_level([b"a"]))
    first = weakref.ref(texts.bind(["a" * 100]))
    texts.bind(["b" * 100])
    assert first() is not None
    texts.bind(["\U0001f600" * 100])  # four bytes each
    assert first() is None


def test_a_list_that_no_request_waits_for_is_not_looked_up():
    texts, gate = BannedTexts(byte_level([b"a"]), max_word_lists=1), threading.Event()
    texts._lists.get()._threads.submit(gate.wait, 20)
    given_up = weakref.ref(texts.bind(["a"]))
    waiting = given_up().prepare("cpu")
    kept = texts.bind(["b"])
    assert given_up() is None and waiting.cancelled()
    gate.set()
    assert kept.prepare("cpu").result(20)


def test_bytes_of_sentencepiece_tokens():
    vocabulary = {"<unk>": 0, "\u2581Tom": 1, "<0xE6>": 2, "s": 3, "\u2581": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>"])
    tokenizer.add_tokens(["<tool_call>"])
    assert token_bytes(tokenizer) == [b"", b" Tom", b"\xe6", b"s", b" ", b"<tool_call>"]
    tokenizer.decoder = decoders.Metaspace(replacement="\u2581")
    assert token_bytes(tokenizer)[2] == b"<0xE6>"
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="decoder is WordPiece"):
        token_bytes(tokenizer)


def test_bytes_of_the_bundled_vocabulary():
    tokenizer = load_tokenizer(MODEL)
    of_id = token_bytes(tokenizer)
    ids = tokenizer.encode("Tom has 17 naïve\n apples… 日本").ids
    assert b"".join(of_id[token] for token in ids).decode() == "Tom has 17 naïve\n apples… 日本"
    assert of_id[0] == b"" and len(of_id) == tokenizer.get_vocab_size()
