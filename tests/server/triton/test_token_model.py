"""`tensorrt_llm`: every tensor of the C++ backend's model, asked for by the real client."""

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpcclient
from adapter_folders import save_output_adapter
from triton_calls import arrays_of, inputs_of, prompt, tokens_of
from tritonclient.utils import InferenceServerException

from gptmanager import word_list
from gptmanager.callbacks import load_peft_adapter

TOKENS = [9, 30, 71, 5, 12]


def generated(arrays, beam=0):
    """Without the prompt."""
    return arrays["output_ids"][0, beam, len(TOKENS) : arrays["sequence_length"][0, beam]].tolist()


def test_prompt_and_output_come_in_one_response(infer, expected):
    arrays = infer(**prompt(*TOKENS))
    assert arrays["output_ids"].tolist() == [[list(expected(TOKENS, 8).output_ids[0])]]
    assert arrays["sequence_length"].tolist() == [[13]]
    assert arrays["output_log_probs"].shape == (1, 1, 5) and not arrays["output_log_probs"].any()
    shapes = {name: array.shape for name, array in arrays.items()}
    assert shapes["cum_log_probs"] == (1, 1)
    assert shapes["context_logits"] == (1, 1, 1) and shapes["generation_logits"] == (1, 1, 1, 1)
    assert arrays["batch_index"].tolist() == arrays["sequence_index"].tolist() == [[0]]


def test_a_stream_has_a_response_for_each_token(stream, expected):
    id = stream.send(**prompt(*TOKENS, streaming=True))
    responses = stream.all()
    assert [one.arrays["output_ids"].shape for one in responses] == [(1, 1, 1)] * 8
    assert [one.arrays["sequence_length"].tolist() for one in responses] == [[[1]]] * 8
    assert tokens_of(responses) == list(expected(TOKENS, 8).generated_ids[0])
    assert {one.id for one in responses} == {id}
    assert [one.is_final for one in responses] == [False] * 7 + [True]


def test_calls_of_one_stream_run_in_parallel(stream, expected):
    ids = [stream.send(**prompt(*TOKENS, index, new=20, streaming=True)) for index in range(8)]
    came = {id: [] for id in ids}
    while not all(found and found[-1].is_final for found in came.values()):
        response = stream.next()
        came[response.id].append(response)
    for index, id in enumerate(ids):
        assert tokens_of(came[id]) == list(expected([*TOKENS, index], 20).generated_ids[0])


def test_only_outputs_that_are_asked_for_come(grpc):
    names = ["sequence_length", "output_ids", "cum_log_probs"]
    outputs = [grpcclient.InferRequestedOutput(name) for name in names]
    inputs = inputs_of(grpcclient, **prompt(*TOKENS, return_log_probs=True))
    arrays = arrays_of(grpc.infer("tensorrt_llm", inputs, outputs=outputs))
    assert list(arrays) == names
    for wrong, told in (
        (names[:1], "output_ids is missing among the outputs"),
        ([*names, "logits"], "unexpected inference output 'logits'"),
    ):
        outputs = [grpcclient.InferRequestedOutput(name) for name in wrong]
        with pytest.raises(InferenceServerException, match=told):
            grpc.infer("tensorrt_llm", inputs, outputs=outputs)


@pytest.mark.parametrize("streams", [False, True])
def test_log_probs_and_logits(infer, stream, expected, streams):
    names = ("return_log_probs", "return_context_logits", "return_generation_logits")
    asked = dict.fromkeys(names, True)
    wanted = expected(TOKENS, 8, **asked).tensors
    if streams:
        stream.send(**prompt(*TOKENS, streaming=True, **asked))
        responses = [one.arrays for one in stream.all()]
        assert all(one["output_log_probs"].shape == (1, 1, 1) for one in responses)
        arrays = {
            name: np.concatenate([one[name] for one in responses], axis=axis)
            for name, axis in {
                **{"output_log_probs": 2, "generation_logits": 2},
                **{"context_logits": 1, "cum_log_probs": 1},
            }.items()
        }
        sums = np.cumsum(arrays["output_log_probs"][0, 0])
        np.testing.assert_allclose(arrays.pop("cum_log_probs")[0], sums, rtol=1e-5)
    else:
        arrays = infer(**prompt(*TOKENS, **asked))
        np.testing.assert_allclose(arrays["cum_log_probs"], wanted["cum_log_probs"], rtol=1e-6)
    for name in ("output_log_probs", "context_logits", "generation_logits"):
        np.testing.assert_allclose(arrays[name], wanted[name].numpy(), rtol=1e-5, atol=1e-5)


SAMPLED = {"temperature": 0.8, "runtime_top_k": 0, "runtime_top_p": 0.9, "random_seed": 2**63 + 5}


@pytest.mark.parametrize(
    "given",
    [
        SAMPLED,
        {**SAMPLED, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        {**SAMPLED, "min_length": 6, "end_id": 5},
        {"beam_width": 3, "len_penalty": 0.5, "early_stopping": True},
        {"draft_input_ids": [17, 18, 19]},
        {"runtime_top_p_min": 0.3, "runtime_top_p_decay": 1.0, "runtime_top_p_reset_ids": 4},
        {"beam_search_diversity_rate": 0.0, "prompt_table_extra_ids": [1, 2**64 - 1]},
    ],
    ids=lambda given: "-".join(given)[:40],
)
def test_inputs_mean_what_they_mean_to_the_engine(infer, expected, given):
    arrays = infer(**prompt(*TOKENS, **given))
    without = ("runtime_top_p_", "beam_search_div", "prompt_table_extra")
    by_name = {name: value for name, value in given.items() if not name.startswith(without)}
    if "early_stopping" in by_name:  # Triton's is a BOOL
        by_name["early_stopping"] = 1
    base = {"temperature": 1.0, "runtime_top_k": 1, "runtime_top_p": 0.0}
    result = expected(TOKENS, 8, **{**base, **by_name})
    found = [generated(arrays, beam) for beam in range(len(result.generated_ids))]
    assert found == list(map(list, result.generated_ids))


def test_beams_are_padded(infer, expected):
    beams = expected(TOKENS, 12, beam_width=4).generated_ids
    for end_id in sorted({token for beam in beams for token in beam}):
        arrays = infer(**prompt(*TOKENS, beam_width=4, end_id=end_id, new=12))
        lengths = arrays["sequence_length"][0].tolist()
        if len(set(lengths)) > 1:
            break
    assert len(set(lengths)) > 1
    for beam, length in enumerate(lengths):
        ids = arrays["output_ids"][0, beam]
        assert (ids[length:] == -1).all() and (ids[:length] >= 0).all()
    assert arrays["output_ids"].shape == (1, 4, max(lengths))


def test_lists_of_words_and_a_bias(infer, expected):
    first = list(expected(TOKENS, 8).generated_ids[0])
    stopped = infer(**prompt(*TOKENS, stop_words_list=word_list([first[3:5], [1]])[0]))
    assert generated(stopped) == first[:3]
    banned = infer(**prompt(*TOKENS, bad_words_list=word_list([first[:1]])[0]))
    assert first[0] not in generated(banned)
    bias = np.zeros(640, dtype=np.float32)
    bias[77] = 1000.0
    assert generated(infer(**prompt(*TOKENS, embedding_bias=bias))) == [77] * 8


def test_the_prompt_may_be_left_out(infer, expected):
    arrays = infer(**prompt(*TOKENS, exclude_input_in_output=True))
    assert arrays["output_ids"].tolist() == [[list(expected(TOKENS, 8).generated_ids[0])]]
    assert arrays["sequence_length"].tolist() == [[8]]


def test_without_an_end_id_nothing_ends_an_output(infer, expected):
    given = prompt(*TOKENS, embedding_bias=np.eye(1, 640)[0] * 1000)  # the checkpoint's end token
    del given["end_id"], given["pad_id"]
    assert generated(infer(**given)) == [0] * 8
    assert generated(infer(**{**given, "end_id": 0})) == []


def test_a_prompt_table(infer, expected):
    table = np.random.default_rng(0).standard_normal((3, 128)).astype(np.float16)
    tokens = [640, 641, 642, *TOKENS]
    arrays = infer(**prompt(*tokens, prompt_embedding_table=table, prompt_vocab_size=3))
    result = expected(tokens, 8, prompt_embedding_table=table, prompt_vocab_size=3)
    assert arrays["output_ids"][0, 0, 8:].tolist() == list(result.generated_ids[0])
    assert result.generated_ids != expected(TOKENS, 8).generated_ids


def test_an_adapter_comes_once_and_later_by_its_id(infer, expected, tmp_path, server):
    weights, config = load_peft_adapter(save_output_adapter(tmp_path / "adapter", seed=3))
    task = {"lora_task_id": 2**63 + 17}
    with pytest.raises(InferenceServerException, match="AdapterError|not cached|task"):
        infer(**prompt(*TOKENS, **task))
    halves = np.asarray(weights, dtype=np.float16)
    first = infer(**prompt(*TOKENS, **task, lora_weights=halves, lora_config=np.asarray(config)))
    later = infer(**prompt(*TOKENS, **task))
    assert generated(first) == generated(later) != generated(infer(**prompt(*TOKENS)))
    server.engine.manager.forget_adapter(task["lora_task_id"])


def test_weights_of_an_adapter_come_in_any_float_datatype(grpc, expected, tmp_path, server):
    given, config = load_peft_adapter(save_output_adapter(tmp_path / "adapter", seed=3))
    weights = torch.as_tensor(given).bfloat16().float().numpy()  # all datatypes hold these
    task = {"lora_task_id": 40, "lora_config": np.asarray(config), "return_log_probs": True}
    wanted = expected(TOKENS, 8, lora_weights=weights, **task)
    uppers = (weights.view("<u4") >> 16).astype("<u2")
    for datatype, sent in (("FP16", weights.astype("<f2")), ("FP32", weights), ("BF16", uppers)):
        server.engine.manager.forget_adapter(40)
        tensor = grpcclient.InferInput("lora_weights", [1, *weights.shape], datatype)
        tensor._raw_content = sent.tobytes()  # NumPy has no BF16
        inputs = inputs_of(grpcclient, **prompt(*TOKENS, **task))
        found = arrays_of(grpc.infer("tensorrt_llm", [*inputs, tensor]))
        assert generated(found) == list(wanted.generated_ids[0])
        np.testing.assert_allclose(
            found["output_log_probs"], wanted.tensors["output_log_probs"], rtol=1e-6
        )
    server.engine.manager.forget_adapter(40)
    assert wanted.generated_ids != expected(TOKENS, 8).generated_ids


def test_sequences_have_an_index(stream, expected):
    given = {**SAMPLED, "num_return_sequences": 6}
    stream.send(**prompt(*TOKENS, **given))
    responses = stream.all()
    assert sorted(int(one.arrays["sequence_index"][0, 0]) for one in responses) == [*range(6)]
    texts = {int(one.arrays["sequence_index"][0, 0]): generated(one.arrays) for one in responses}
    assert len(set(map(tuple, texts.values()))) > 3
    assert texts[0] == list(expected(TOKENS, 8, **SAMPLED).generated_ids[0])
    stream.send(**prompt(*TOKENS, **given))
    again = stream.all()
    assert texts == {
        int(one.arrays["sequence_index"][0, 0]): generated(one.arrays) for one in again
    }


def test_the_best_beams_come_as_one_sequence(infer, expected):
    arrays = infer(**prompt(*TOKENS, beam_width=4, num_return_sequences=2))
    result = expected(TOKENS, 8, beam_width=4, num_return_sequences=2)
    assert [generated(arrays, beam) for beam in range(2)] == list(map(list, result.generated_ids))
    assert arrays["output_ids"].shape[1] == 2


def batch(rows, **others):
    """The inputs of rows that are equally long, and want the same."""
    given = prompt(*rows[0], **others)
    del given["input_ids"]
    found = {name: np.full((len(rows), 1), value) for name, value in given.items()}
    return {**found, "input_ids": np.array(rows)}


def test_rows_of_a_batch_have_an_index(stream, expected):
    rows = [[9, 30, 71, 5], [12, 13, 14, 0], [44, 45, 0, 0]]
    lengths = [4, 3, 2]
    given = batch(rows)
    given.update(input_lengths=np.array(lengths)[:, None])
    given["request_output_len"] = np.array([[9], [5], [7]])
    for streams in (False, True):
        stream.send(**{**given, "streaming": np.full((3, 1), streams)})
        responses = stream.all()
        assert [one.is_final for one in responses] == [False] * (len(responses) - 1) + [True]
        for index, (row, length, new) in enumerate(zip(rows, lengths, (9, 5, 7), strict=True)):
            own = [one for one in responses if one.arrays["batch_index"].tolist() == [[index]]]
            assert len(own) == (new if streams else 1)
            result = expected(row[:length], new)
            wanted = result.generated_ids if streams else result.output_ids
            assert tokens_of(own) == list(wanted[0])


def test_a_row_that_fails_harms_no_other(stream, expected):
    given = batch([TOKENS] * 3, new=6)
    given["temperature"] = np.array([[1.0], [np.nan], [1.0]], dtype=np.float32)
    stream.send(**given)
    responses = [stream.next() for _ in range(3)]
    failed = [one for one in responses if one.error is not None]
    assert len(failed) == 1 and "temperature = nan is not finite" in str(failed[0].error)
    rest = [one for one in responses if one.error is None]
    assert {int(one.arrays["batch_index"][0, 0]) for one in rest} == {0, 2}
    assert all(one.tokens == list(expected(TOKENS, 6).output_ids[0]) for one in rest)


def test_typed_contents_equal_bytes(front):
    import grpc as grpc_package

    pb, service = grpcclient.service_pb2, grpcclient.service_pb2_grpc
    message = pb.ModelInferRequest(model_name="tensorrt_llm", id="typed")
    for name, datatype, shape, contents in (
        ("input_ids", "INT32", [1, 3], {"int_contents": [9, 30, 71]}),
        ("input_lengths", "INT32", [1, 1], {"int_contents": [3]}),
        ("request_output_len", "INT32", [1, 1], {"int_contents": [2]}),
        ("temperature", "FP32", [1, 1], {"fp32_contents": [1.0]}),
        ("random_seed", "UINT64", [1, 1], {"uint64_contents": [2**64 - 1]}),
        ("return_log_probs", "BOOL", [1, 1], {"bool_contents": [True]}),
    ):
        message.inputs.add(name=name, datatype=datatype, shape=shape).contents.MergeFrom(
            pb.InferTensorContents(**contents)
        )
    with grpc_package.insecure_channel(f"127.0.0.1:{front.port}") as channel:
        response = service.GRPCInferenceServiceStub(channel).ModelInfer(message)
    assert response.id == "typed" and response.outputs[0].name == "output_ids"
    assert list(response.outputs[0].shape) == [1, 1, 5]
    assert torch.frombuffer(bytearray(response.raw_output_contents[0]), dtype=torch.int32)[2] == 71
