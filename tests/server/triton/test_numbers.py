"""Log probabilities, logits, beams and prompt tables over gRPC, beside transformers' Llama."""

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpcclient
from running_server import MODEL
from transformers import AutoModelForCausalLM
from triton_calls import arrays_of, inputs_of, prompt

TOKENS, NEW = [9, 30, 71, 5, 12], 8
TABLE = (np.random.default_rng(0).standard_normal((3, 128)) * 0.1).astype(np.float32)


@pytest.fixture(scope="module")
def llama():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(llama, ids):
    return llama(torch.tensor([ids])).logits[0]


def chosen(logits, ids):
    """Log probabilities of the tokens after the prompt, under the logits before them."""
    found = logits.log_softmax(-1)[len(TOKENS) - 1 : -1]
    return found[range(len(found)), ids[len(TOKENS) :]].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_logits(infer, llama, temperature):
    names = ("return_log_probs", "return_context_logits", "return_generation_logits")
    asked = {"runtime_top_k": 0, "random_seed": 3, "temperature": temperature}
    arrays = infer(**prompt(*TOKENS, new=NEW, **asked, **dict.fromkeys(names, True)))
    ids = arrays["output_ids"][0, 0].tolist()
    logits = logits_of(llama, ids)
    wanted = chosen(logits / temperature, ids)
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(arrays["output_log_probs"][0, 0], wanted, **close)
    np.testing.assert_allclose(arrays["cum_log_probs"], [[wanted.sum()]], **close)
    np.testing.assert_allclose(arrays["context_logits"][0], logits[: len(TOKENS)], **close)
    after = logits[len(TOKENS) - 1 : -1]
    np.testing.assert_allclose(arrays["generation_logits"][0, 0], after, **close)


def test_beams(infer, llama):
    wanted = llama.generate(
        torch.tensor([TOKENS]),
        attention_mask=torch.ones(1, len(TOKENS), dtype=torch.int64),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        length_penalty=0.0,
    )
    asked = {"beam_width": 4, "len_penalty": 0.0, "return_log_probs": True}
    arrays = infer(**prompt(*TOKENS, new=NEW, **asked))
    assert arrays["output_ids"][0].tolist() == wanted.tolist()
    for beam, ids in enumerate(wanted.tolist()):
        log_probs = chosen(logits_of(llama, ids), ids)
        found = arrays["output_log_probs"][0, beam]
        np.testing.assert_allclose(found, log_probs, rtol=1e-4, atol=1e-4)
        assert arrays["cum_log_probs"][0, beam] == pytest.approx(log_probs.sum(), abs=1e-3)


def halves(array):
    """BF16: the upper halves of floats."""
    return (array.view("<u4") >> 16).astype("<u2")


@pytest.mark.parametrize(
    "datatype, sent, meant",
    [
        ("FP16", TABLE.astype("<f2"), TABLE.astype("<f2").astype("<f4")),
        ("FP32", TABLE, TABLE),
        ("BF16", halves(TABLE), (halves(TABLE).astype("<u4") << 16).view("<f4")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_prompt_tables_of_any_float(grpc, llama, datatype, sent, meant):
    table = grpcclient.InferInput("prompt_embedding_table", [1, *TABLE.shape], datatype)
    table._raw_content = sent.tobytes()  # NumPy has no BF16
    given = prompt(640, 641, 642, *TOKENS, new=NEW, return_context_logits=True)
    inputs = [*inputs_of(grpcclient, **given), table]
    arrays = arrays_of(grpc.infer("tensorrt_llm", inputs))
    embed = llama.get_input_embeddings()
    with torch.no_grad():
        vectors = torch.cat([torch.from_numpy(meant), embed(torch.tensor(TOKENS))])
        logits = llama(inputs_embeds=vectors[None]).logits[0]
    np.testing.assert_allclose(arrays["context_logits"][0], logits, rtol=1e-4, atol=1e-4)
