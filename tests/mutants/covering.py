"""Which tests are to find a mistake in which file, the likeliest first."""

from __future__ import annotations

import functools
from pathlib import Path

_CONTEXT = "test_context_attention test_attention_borders test_far_pages"
# Not intrinsics.cuh: the emulator has other bodies, and test_machine_code.py tells what they are.
_CUDA = {
    "activation_kinds.cuh": "test_activations test_moe",
    "activations.cu": "test_activations",
    "adjustments.cu": "test_adjustments_kernel",
    "beam_step.cu": "test_beam_step_kernel",
    "block_copy.cu": "test_block_copy test_far_pages",
    "cache_write.cu": "test_cache_write test_far_pages",
    "choice.cuh": "test_beam_step_kernel test_log_probs_kernel test_sampling_kernel",
    "context_attention.cu": _CONTEXT,
    "context_softmax.cuh": _CONTEXT,
    "context_tiles.cuh": _CONTEXT,
    "context_work.cuh": _CONTEXT,
    "delta_rule.cu": "test_recurrent_kernels",
    "float8_weights.cuh": "test_quantized_weights test_gemv test_gemm test_moe",
    "float_attention.cu": "test_attention_borders test_generation_attention test_context_attention"
    " test_far_pages",
    "fp8.cuh": "test_fp8_conversion test_cache_write test_generation_attention",
    "generation_attention.cu": "test_generation_attention test_attention_borders test_far_pages",
    "gemm.cu": "test_gemm test_prefetches",
    "gemm_tiles.cuh": "test_gemm test_moe test_prefetches",
    "gemv.cu": "test_gemv test_prefetches",
    "gemv_int4.cu": "test_gemv_int4 test_prefetches",
    "kth_best.cuh": "test_sampling_kernel",
    "log_probs.cu": "test_log_probs_kernel",
    "logits_row.cuh": "test_sampling_kernel",
    "lora.cu": "test_lora",
    "moe.cu": "test_moe",
    "norms.cu": "test_norms",
    "numerics.cuh": "test_norms test_activations test_cache_write test_attention_borders"
    " test_generation_attention",
    "pages.cuh": "test_generation_attention test_attention_borders test_context_attention"
    " test_far_pages",
    "partials.cuh": "test_generation_attention test_attention_borders",
    "matmul_sums.cuh": "test_gemv test_lora",
    "recurrent.cuh": "test_recurrent_kernels",
    "sampling.cu": "test_sampling_kernel",
    "state_space.cu": "test_recurrent_kernels",
    "token_masks.cu": "test_token_masks_kernel",
    "widening.cuh": "test_gemv test_gemv_int4 test_gemm test_moe",
    "warpgroup_attention.cu": "test_context_attention test_far_pages test_machine_code",
}
_CHOICES = "test_launch_choices test_dependent_kernels"  # which kernel is launched, and how
_PROVIDERS = "test_provider_rules test_attention_providers"
# What launches kernels, plans for them and brings them what they read.
_LAUNCHES = {
    "adjustments.py": f"test_adjustments_kernel test_adjustments {_CHOICES}",
    "byte_rows.py": "test_quantized_weights",
    "cache_folder.py": "test_cache_folder",
    "compiler.py": "test_compiler test_cache_folder test_machine_code",
    "context_attention.py": "test_context_attention test_attention_borders test_mixed_steps "
    f"{_CHOICES}",
    "delta_rule.py": f"test_recurrent_kernels {_CHOICES}",
    "dependent_launch.py": "test_launch test_dependent_kernels",
    "device.py": "test_device",
    "device_matrices.py": "test_quantized_weights test_gemv",
    "downloads.py": "test_device_chooser test_device_executor",
    "features.py": "test_features",
    "flash_attention.py": _PROVIDERS,
    "flashinfer_attention.py": _PROVIDERS,
    "float_attention.py": f"test_generation_attention test_context_attention {_CHOICES}",
    "gemm.py": f"test_gemm test_prefetches {_CHOICES}",
    "gemv.py": f"test_gemv test_prefetches {_CHOICES}",
    "gemv_int4.py": f"test_gemv_int4 test_prefetches {_CHOICES}",
    "generation_attention.py": f"test_generation_plan test_generation_attention {_CHOICES}",
    "generation_plan.py": "test_generation_plan test_generation_attention",
    "graphs.py": "test_step_graphs test_step_launches test_mixed_steps",
    "kernels.py": "test_step_launches test_matmul_choice test_lora test_families_on_devices",
    "launch.py": "test_launch test_gemv test_sampling_kernel",
    "matrix.py": "test_compiler",
    "moe.py": "test_moe",
    "own_matmuls.py": "test_matmul_choice test_gemv test_launch_choices",
    "provider_libraries.py": _PROVIDERS,
    "paged_kernels.py": "test_cache_write test_generation_attention test_context_attention",
    "matmul_choice.py": "test_matmul_choice",
    "scaled_matmul.py": "test_quantized_weights test_matmul_choice",
    "sampling.py": f"test_sampling_kernel test_sampling test_device_chooser {_CHOICES}",
    "state_space.py": f"test_recurrent_kernels {_CHOICES}",
    "streams.py": "test_streams test_device_executor test_raw_kernel_graphs",
    "thread_contexts.py": "test_features test_launch",
    "uploads.py": "test_device_executor test_step_launches",
    "warpgroup_attention.py": f"test_context_attention test_machine_code {_CHOICES}",
}
_EMULATOR = "test_emulator test_emulator_bugs test_device_functions test_launch"
_MATRICES = f"{_EMULATOR} test_gemv test_context_attention"
_EMULATED = {"intrinsics_cpu.h": _MATRICES, "warp.h": _MATRICES, "warpgroup.cpp": _MATRICES}
_MATMULS = "test_kernel_memory test_packed_matmul test_kernels"
_RULES = "test_provider_rules test_providers"
_EXPERTS = "test_cpu_experts"
_INT4 = "test_int4_matmul test_int4_rounding"
_CPU = {
    "activation_kinds.py": "test_kernels test_float64",
    "activation_loops.py": "test_kernel_memory test_kernels",
    "adapter_arguments.py": "test_adapter_kernels",
    "adapter_formulas.py": "test_adapter_kernels",
    "adapter_intrinsics.py": "test_kernel_memory test_adapter_kernels",
    "adapter_plan.py": "test_kernel_memory test_adapter_kernels",
    "adapters.py": "test_kernel_memory test_adapter_kernels",
    "attention_arguments.py": "test_kernel_memory test_kernels",
    "attention_task.py": "test_kernel_memory test_kernels",
    "head_matmul.py": "test_kernel_memory test_kernels",
    "head_ops.py": "test_kernels test_float64 test_deterministic_families",
    "convolution.py": "test_short_convolution test_delta_rule",
    "convolution_loops.py": "test_short_convolution test_delta_rule test_state_space",
    "cpu_elementwise.py": "test_kernel_memory test_kernels test_float64",
    "cpu_experts.py": _EXPERTS,
    "cpu_recurrent.py": "test_delta_rule test_short_convolution test_state_space",
    "delta_formulas.py": "test_delta_rule",
    "delta_loops.py": "test_delta_rule",
    "elementwise_ops.py": "test_kernels test_float64 test_deterministic_families",
    "grouped_matmul.py": _EXPERTS,
    "int4_activations.py": _INT4,
    "int4_groups.py": _INT4,
    "int4_matmul.py": _INT4,
    "int4_matrix.py": f"{_INT4} test_gemv_int4 test_panel_writing test_matmul_choice "
    "test_conversion test_quantized_weights",
    "int4_tiles.py": _INT4,
    "int8_tiles.py": _MATMULS,
    "int16_tiles.py": _MATMULS,
    "lanes.py": "test_kernel_memory test_kernels test_adapter_kernels",
    "machine_code.py": "test_kept_kernels",
    "matmul.py": _MATMULS,
    "matrix_tiles.py": _MATMULS,
    "mixture.py": _EXPERTS,
    "packed_matrix.py": f"{_MATMULS} test_panel_writing test_matmul_choice",
    "panel_writing.py": f"test_panel_writing {_MATMULS}",
    "tiles.py": "test_panel_writing",
    "code_loops.py": "test_panel_writing test_quantized_formats",
    "codes.py": "test_panel_writing test_quantized_formats",
    "column_loops.py": "test_panel_writing test_quantized_formats",
    "word_loops.py": "test_panel_writing test_quantized_formats",
    "words.py": "test_panel_writing test_quantized_formats",
    "weight_quantization.py": f"{_MATMULS} test_int4_rounding",
    "paged_attention.py": "test_kernel_memory test_kernels",
    "provided.py": f"{_RULES} test_attention_providers",
    "providers.py": _RULES,
    "pairs.py": "test_kernel_memory test_packed_matmul test_adapter_kernels",
    "matmul_plan.py": _MATMULS,
    "small_matmul.py": "test_kernel_memory test_kernels",
    "captured_step.py": "test_captured_steps",
    "quantized_activations.py": _MATMULS,
    "recurrent_ops.py": "test_delta_rule test_short_convolution test_state_space",
    "memory_loops.py": "test_delta_rule test_state_space",
    "state_space_formulas.py": "test_state_space",
    "state_space_loops.py": "test_state_space",
    "reference.py": "test_kernels test_adapter_kernels test_float64",
    "routing.py": f"{_EXPERTS} test_moe",
    "routing_loops.py": _EXPERTS,
    "threads.py": "test_kernels test_adapter_kernels test_captured_steps",
    "torch_operations.py": "test_torch_operations test_captured_steps",
    "per_token_kernels.py": "test_kernel_memory test_kernels",
    "token_masks.py": "test_token_masks",
}
# What chooses providers, captures steps as CUDA graphs, computes steps, and chooses tokens.
_CHOOSER = "test_executor test_top_log_probs test_beam_search test_prompt_lookup test_logits"
_DEVICE_STEPS = "test_step_launches test_mixed_steps test_device_executor"
_RANKS = "test_rank_executor test_rank_parity"
_OTHERS = {
    "gptmanager/assembly/attention_choice.py": _RULES,
    "gptmanager/assembly/attention_trial.py": _RULES,
    "gptmanager/assembly/provider_options.py": _RULES,
    "gptmanager/executor/captured_steps.py": "test_step_graphs test_mixed_steps",
    "gptmanager/executor/choice/device_chooser.py": f"{_DEVICE_STEPS} test_device_chooser",
    "gptmanager/executor/choice/drawn_drafts.py": "test_drawn_drafts",
    "gptmanager/executor/choice/gathered_logits.py": f"test_gathered_logits {_CHOOSER}",
    "gptmanager/executor/choice/prompt_scores.py": "test_top_log_probs test_log_probs_kernel",
    "gptmanager/executor/choice/token_chooser.py": f"{_CHOOSER} test_guided_beams",
    "gptmanager/executor/choice/top_tokens.py": "test_top_log_probs",
    "gptmanager/executor/device_runner.py": f"{_DEVICE_STEPS} test_device_chooser",
    "gptmanager/executor/forward_thread.py": f"{_RANKS} test_adapter_loader",
    "gptmanager/executor/out_of_memory.py": "test_memory_shortage",
    "gptmanager/executor/packed_rows.py": f"test_mixed_steps test_memory_shortage {_CHOOSER}",
    "gptmanager/executor/rank_executor.py": _RANKS,
    "gptmanager/executor/result_message.py": _RANKS,
    "gptmanager/executor/runner.py": f"{_CHOOSER} test_captured_steps test_prompt_embeddings "
    "test_adapters_in_models test_memory_of_managers test_weight_updates test_step_signal",
    "gptmanager/executor/sequence_tables.py": f"{_CHOOSER} {_DEVICE_STEPS} test_rank_executor",
    "gptmanager/executor/staged_executor.py": f"{_RANKS} test_rank_faults",
    "gptmanager/executor/step_in_flight.py": f"{_CHOOSER} test_drawn_drafts",
    "gptmanager/executor/torch_executor.py": f"{_CHOOSER} test_gathered_logits test_sink_tokens "
    "test_attention_window test_memory_shortage test_top_log_probs test_recovery",
    "gptmanager/manager/generation_control.py": "test_manager test_weight_updates",
    "gptmanager/manager/rank_calls.py": "test_rank_weights test_rank_hosts",
    "gptmanager/manager/weight_updates.py": "test_weight_updates test_rank_weights",
    "gptmanager/models/converted_tensors.py": "test_conversion test_hostile_checkpoints",
}
_ANSWERS = "test_tool_parsing test_tool_formats test_cut_answers test_served_calls"
# What decides, and what it keeps account of: all files of a package have the same tests.
_CORE = {
    "gptmanager/kv_cache": "test_kv_cache test_kv_cache_state test_capacity_scheduler "
    "test_eviction test_prefix_tree test_host_tier test_offloading test_kv_cache_reuse "
    "test_reuse_delay test_retention_priority test_clear_cached test_sizing test_kv_cache_trial "
    "test_block_reuse test_attention_window",
    "gptmanager/loop": "test_loop test_admission test_adapters_in_the_loop test_micro_batches "
    "test_outputs test_preparation test_stop_words test_end_ids test_back_pressure "
    "test_why_waiting test_recovery test_foreseen_starts test_top_log_probs "
    "test_loop_state_machine test_attention_window",
    "gptmanager/scheduler": "test_capacity_scheduler test_micro_batch_scheduler "
    "test_simple_scheduler test_reuse_delay test_retention_priority test_scheduler_oracle "
    "test_back_pressure test_why_waiting test_foreseen_starts test_micro_batches",
    "gptmanager/memory": "test_weights test_kv_pool test_host_tier test_adapter_pool "
    "test_adapter_loader test_slot_states test_host_memory test_cuda_kv_pool test_conversion "
    "test_hostile_checkpoints test_updates_of_families test_quantized_memory test_mlx_folders "
    "test_rank_models test_weight_updates test_memory_of_managers",
    # What chooses tokens, and what ends a request.
    "gptmanager/decoding": "test_prompt_lookup test_stop_words test_end_ids test_outputs "
    "test_sums_and_streams test_sampling test_beam_search",
    "gptmanager/decoding/guided": "test_guided test_json_schemas test_guided_bans "
    "test_grammar_start test_hostile_grammars test_guided_beams",
    "gptmanager/decoding/processors": "test_row_processors test_logits test_raw_kernel",
    "gptmanager/decoding/sampling": "test_random_numbers test_admission test_adjustments "
    "test_sampling test_top_log_probs test_drawn_drafts",
    "gptmanager/decoding/search": "test_beam_ends test_beam_search test_beam_reuse",
    # What lives around the loop, and what a host would have written.
    "gptmanager/manager": "test_step_signal test_inspection test_watching test_forgotten_managers "
    "test_why_waiting test_recovery test_hangs test_manager test_journal_resumes",
    "callbacks": "test_start test_peft_adapter test_serving",
    "callbacks/adapters": "test_peft_adapter",
    "callbacks/live_page": "test_live_page",
    "callbacks/processors": "test_banned_texts test_raw_kernel test_guided test_documented_names",
    "callbacks/queue": "test_wakeups test_result test_pending_requests test_attachment "
    "test_async_request_queue test_request_queue test_stop_strings test_generation "
    "test_interrupted_queue test_documented_names",
    "callbacks/ranks": "test_mpi_transport test_rank_hosts",
    "callbacks/sinks": "test_observers test_logging_sink test_json_lines_sink test_prometheus_sink "
    "test_metrics",
    "callbacks/text": "test_stop_strings test_stops test_text_stream test_chat_template "
    "test_checkpoint test_control_tokens",
    "callbacks/answers": "test_reasoning test_served_thoughts test_tool_formats",
    "callbacks/answers/parsing": f"{_ANSWERS} test_chat_answer test_chat",
    "callbacks/answers/tool_formats": _ANSWERS,
    # How callbacks are called, on one rank or on several, and what is kept of the requests.
    "gptmanager/host": "test_hosts test_hangs test_manager test_callables test_request_fuzz "
    "test_recorder test_adapter_loader test_weight_updates test_rank_hosts",
    "gptmanager/ranks": "test_collectives test_rank_messages test_rank_links test_rank_world "
    "test_rank_faults test_rank_hosts",
    "gptmanager/lifecycle": "test_log test_hangs test_interrupted_waits test_child_process "
    "test_callables test_watching test_step_signal test_hosts",
    "gptmanager/journal": "test_journal_command test_journal_disk test_journal_deaths "
    "test_journal_resumes",
    # What happened, and what would have happened.
    "gptmanager/recorder": "test_black_box test_recorder test_hostile_recordings test_watching "
    "test_replay test_adapters_in_recordings",
    "gptmanager/replay": "test_replay test_recorder test_black_box",
    "gptmanager/simulator": "test_simulator test_hostile_recordings test_recorder",
    "gptmanager/bindings": "test_bindings test_hosts",
    # What the commands do.
    "gptmanager/commands": "test_cli test_vllm_peer test_bench",
    "gptmanager/commands/chat": "test_conversation test_chat_thoughts test_chat_command",
    "gptmanager/commands/checkpoints": "test_local_models test_conversion test_cli",
    "gptmanager/commands/run": "test_requests_file test_progress_display test_interrupted_run "
    "test_signals test_cli",
    "gptmanager/server": "test_fields test_request_fields test_openapi test_endpoints test_engine "
    "test_serving_page test_live_page_served test_garbage_collection test_request_log "
    "test_listening test_lifetime test_completions test_anthropic",
    "gptmanager/server/anthropic": "test_anthropic test_embedding_parts test_served_thoughts",
    "gptmanager/server/chat": "test_messages test_tools test_chat_answer test_control_tokens "
    "test_embedding_parts test_served_calls test_chat test_chat_templates test_anthropic",
    "gptmanager/server/engine": "test_engine test_access test_metrics test_idempotency "
    "test_request_log test_served_calls test_responses test_clients_gone test_lifetime",
    "gptmanager/server/http": "test_warning_header test_keys test_listening test_access test_http "
    "test_idempotency test_request_log test_hostile_bodies test_waiting_streams test_limits",
    "gptmanager/server/openai": "test_strict_shapes test_endpoints test_streams test_access "
    "test_responses test_completions test_chat",
    "gptmanager/server/text": "test_outputs test_streams test_structured test_chat_log_probs "
    "test_fields test_cut_answers test_completions",
    "gptmanager/server/triton": "test_call_log test_refusals test_numbers test_limits "
    "test_client_options test_statistics test_token_model test_text_model test_any_bytes test_http "
    "test_stop test_lifetime test_backend_client",
}
_ANY_OF_CPU = (
    "test_kernel_memory test_kernels test_packed_matmul test_adapter_kernels test_token_masks"
)


def files(root: Path) -> list[str]:
    """What mistakes are planted in."""
    left_out = ("intrinsics.cuh", "__init__.py")
    paths = [
        *(
            path
            for folder in ("cuda", "gptmanager/kernels")
            for path in (root / folder).rglob("*.*")
        ),
        *(path for folder in _CORE for path in (root / folder).glob("*.py")),
    ]
    of_folders = [
        path.relative_to(root).as_posix()
        for path in sorted(paths)
        if path.name not in left_out and "__pycache__" not in path.parts
    ]
    return [*dict.fromkeys([*of_folders, *_OTHERS])]


def covering_tests(root: Path, file: str) -> list[str]:
    """Return the tests of a file.

    A file in cuda/ without an entry has the tests of its name, or of the files that include it.
    Raise ValueError if there are none.
    """
    if file in _OTHERS:
        return _paths(root, _OTHERS[file])
    folder, _, name = file.rpartition("/")
    if folder in _CORE:
        return _paths(root, _CORE[folder])
    if folder == "cuda/emulator":
        return _paths(root, _EMULATED.get(name, _EMULATOR))
    if not folder.startswith("cuda"):
        return _paths(root, _CPU.get(name, _ANY_OF_CPU))
    stem = name.partition(".")[0]
    own = f"test_{stem} test_{stem}_kernel"
    if name.endswith(".py"):
        own = _LAUNCHES.get(name, f"{own} {_CHOICES}")
    else:
        own = _CUDA.get(name, own)
    found = _paths(root, own) or _tests_of_users(root, file.removeprefix("cuda/"))
    if name.endswith((".cu", ".cuh")):  # tests of the same name on a CPU launch no kernel
        found = [path for path in found if path.startswith("tests/cuda/")]
    if not found:
        raise ValueError(f"{file} has no tests in tests/mutants/covering.py")
    return found


def _tests_of_users(root: Path, header: str) -> list[str]:
    users = [
        path.relative_to(root).as_posix()
        for path in sorted((root / "cuda").rglob("*.cu*"))
        if f'#include "{header}"' in path.read_text("utf-8")
    ]
    tests = [test for user in users for test in covering_tests(root, user)]
    return [*dict.fromkeys(tests)]


def _paths(root: Path, names: str) -> list[str]:
    """Return the files of `names` that exist, in whatever folder of tests."""
    tests = _tests(root)
    return [path for name in names.split() for path in tests if path.endswith(f"/{name}.py")]


@functools.cache
def _tests(root: Path) -> list[str]:
    paths = root.glob("tests/**/test_*.py")
    return sorted(path.relative_to(root).as_posix() for path in paths)
