"""The architecture: one total order of modules. A module imports only modules above it in the list.

The modules of a package or sub-package are adjacent, so packages are ordered too. An `__init__`
counts as below its modules, which it re-exports. The tests also check `no torch` in a description.
docs/architecture.md describes both levels of packages in the same words.
"""

import ast
import re
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

LAYERS = """
errors                        all exceptions of the library, as one tree
environment/                  the installed package, and the machine that it runs on
    lazy_names                names of a package that are imported on first use (no torch)
    interpreter               refuses sub-interpreters, in which torch does not work (no torch)
    distribution              name and version of the installed package (no torch)
    legible_json              values that JSON can hold, without lone surrogates (no torch)
    machine/                  cores, memory, processor, addresses and models of the machine
        loopback              whether a host is localhost or a loopback address (no torch)
        control_groups        CPU and memory limits of containers and systemd (no torch)
        cores                 number of cores that this process may use (no torch)
        cpu_features          features of the processor that compiled code may use (no torch)
        memory                free memory, huge pages, and memory given back (no torch)
        local_models          finds the models on this machine, by name (no torch)
lifecycle/                    states of a manager; clocks, logging, child processes, watchdog
    callables                 check that a host's callable is an ordinary function (no torch)
    clock                     system clocks, unaffected by patches of `time` (no torch)
    log                       the library's logger, which never raises (no torch)
    child_loop                the loop of a child process that answers questions (no torch)
    child_process             a child process with limited time and memory (no torch)
    per_process               a value that a forked process makes again (no torch)
    latch                     an event that signal handlers may wait for (no torch)
    condition                 a wait for a change, which an exception may interrupt (no torch)
    latched_future            a future with waits that an exception may interrupt (no torch)
    threads                   a start of a thread, which an exception may interrupt (no torch)
    watchdog                  detects a callback that exceeds its time limit
    state                     states of a manager, and its health
arguments                     checks of constructor arguments, by name (no torch)
config                        OptionalParams and all other options of a host; enums (no torch)
terminal/                     shared by the commands: arguments, tables, progress bars
    signals                   signals that end a command: at once, or by an exception (no torch)
    printable                 makes any text safe to print on a terminal (no torch)
    streams                   standard streams that are closed, full or have no reader (no torch)
    redrawn_lines             the last lines of a terminal, redrawn in place (no torch)
    progress                  progress bars (no torch)
    tables                    reports as tables for people, or as JSON (no torch)
    arguments                 parsers of argument values: numbers, sizes, folders (no torch)
    sampling                  options of run and chat, and limits of the server's fields (no torch)
    other_servers             options of other servers, and what replaces them (no torch)
    option_sources            options from the environment and from a file (no torch)
    option_names              errors that name options instead of parameters (no torch)
    parser                    the parser of all commands (no torch)
    options                   options that several commands share (no torch)
request/                      requests as hosts make them and as schedulers see them
    post_processor            how a request names its logits post-processor (no torch)
    input_rows                arrays of a request, identified by their digest
    sampling_params           sampling parameters of a request (no torch)
    output_options            which outputs a request asks for (no torch)
    llm_request               a request as schedulers and the KV cache see it (no torch)
    inference_request         InferenceRequest and NamedTensor, as hosts use them
    pieces                    long work in pieces, with pauses between them
    arrays                    values of any type as arrays
    read_tensors              typed values from the named tensors of a request
    adapter_modules           modules of a model that adapters may change
    adapter                   LoRA matrices of a request, checked
kv_cache/                     block accounting: which sequence holds which block
    attention_window          which positions and blocks a sliding window keeps (no torch)
    block                     blocks and their reference counts (no torch)
    prefix_tree               prefix caching: blocks found by their tokens (no torch)
    state_snapshots           copies of recurrent states, by cached block (no torch)
    eviction                  which cached block is evicted first (no torch)
    offloading                offloading of cached blocks to host memory (no torch)
    needs                     number of blocks that a request will need (no torch)
    prefix_lookups            cached prefixes of waiting requests (no torch)
    block_reuse               cached blocks for new sequences, and from ended ones (no torch)
    sequences                 blocks of each sequence (no torch)
    manager                   KvCacheManager: allocates and frees blocks (no torch)
    state                     block accounting as data, and restored from it (no torch)
peft_cache/                   cache of LoRA adapters: pages, users, eviction
    layout                    page size, and where each row of an adapter is stored (no torch)
    page_eviction             pages of one cache level, and which adapters lose theirs (no torch)
    manager                   which adapters are cached, and which requests use them (no torch)
    state                     page accounting as data, and restored from it (no torch)
    work                      adapters to read, write and copy
scheduler/                    capacity and micro-batch schedulers: which requests run
    wait_reasons              reasons why a request waits
    adapter_pages             checks that the adapters of a batch fit together (no torch)
    bulk_counts               block needs of many requests in one call (no torch)
    reuse_delay               delays a prompt whose prefix another request computes now (no torch)
    capacity                  which requests get memory; base of all capacity schedulers (no torch)
    max_utilization           pauses requests when the KV cache is full (no torch)
    reuse_credit              number of prompt tokens that the cache already has (no torch)
    chunked_context           divides the token budget of a step among prompts (no torch)
    micro_batch               which requests run now, and how much of each prompt (no torch)
    simple                    a capacity and a micro-batch scheduler combined (no torch)
statistics                    statistics of an iteration
step                          values passed between loop, executor and host
kernels/                      all operations of a model in torch, and compiled ones for CPUs
    torch_operations          observes each torch operation of a step
    simd/                     SIMD lanes, dtypes, threads and machine code for compiled loops
        inner_functions       functions that only compiled functions call
        lanes                 SIMD intrinsics for Numba
        dtypes                loads and stores of any dtype as float32 lanes
        byte_tables           lookups of bytes in a table of sixteen
        tiles                 tiles of sixteen rows, transposed in registers
        pairs                 dot products of bfloat16 pairs, if the CPU has them
        threads               compiled functions on torch's threads
        machine_code          compiled functions, cached on disk
    compilation               compiles functions on all cores (no torch)
    capture/                  generation steps captured as lists of tasks
        task_list             a list of tasks as one task
        captured_step         a decode step captured as tasks, and run again
    per_token_kernels         rotary embedding, KV write, norms and conversions
    activations/              activations, and other operations on single elements
        activation_kinds      activations of MLPs, by name
        activation_loops      activations, compiled
    embedding_lookup          lookups of tokens in an embedding table
    gemm/                     matmuls with packed weights
        int4_groups           weights in 4 bits, in groups with a scale each
        weight_quantization   quantizes weights to int8 or to groups of 4 bits
        panels/               rows of weights, and of quantized checkpoints, written to panels
            panel_writing     writes rows of weights to panels
            code_loops        numbers of 8 bits or fewer to floats, or to int8 panels
            column_loops      integers in words to int8 panels, sixteen rows at a time
            word_loops        numbers in words to bytes, or to panels of 4 bits
            words             4-bit values in words, as a checkpoint stores them
            codes             numbers of 8 bits or fewer, as a checkpoint stores them
        packed_matrix         weights as floats or in int8, packed for matmuls
        small_matmul          small matmuls in register tiles
        matrix_tiles          register tiles of matmuls, by dtype
        quantized_activations activations quantized to int8 or int16
        int16_tiles           int8 weights times few rows, in int16
        int8_tiles            int8 weights times many rows, in int8
        int4_matrix           weights in 4 bits, packed for matmuls
        int4_activations      activations quantized in groups
        int4_tiles            int4 weights times rows, in int8 or int16, and widened
        matmul_task           a matmul with packed weights: its parts, and how each ends
        matmul                the matmul of activations with packed weights
        int4_matmul           the matmul of activations with weights in 4 bits
        unit/                 matmuls of bytes in the matrix unit
            int8_unit_tiles   int8 or int4 weights times rows, in register tiles
            unit_matmul       matmuls with weights in 8 or 4 bits
        grouped_matmul        many matmuls as one task
        matmul_plan           which instructions a matmul uses, and whether packing pays
    attention/                attention over the pages of the KV cache
        attention_arguments   arguments of attention: pages, rows, shapes
        paged_formulas        attention over pages in torch
        head_ops              operations on the heads of tokens, in torch
        attention_task        one attention task: its rows, pages and scratch memory
        paged_attention       paged attention, compiled
        head_matmul           matmuls of heads with their own matrices, compiled
    elementwise_ops           activations, and other operations on single elements, in torch
    lora/                     LoRA on the tokens of a step
        adapter_arguments     which adapter each token uses, and the output columns
        adapter_formulas      LoRA in torch
        adapter_intrinsics    products with A and B, in registers
        adapters              LoRA products for all tokens of a step
        adapter_plan          groups the tokens of a step by adapter
    experts/                  mixtures of experts
        routing               chooses and weighs the experts of each token
        mixture               matmuls of experts over tokens sorted by expert
        routing_loops         chooses experts and gathers their inputs, compiled
    recurrent/                recurrent layers: gated delta rule, short convolutions, Mamba-2
        convolution           causal convolutions of channels in torch
        delta_formulas        the gated delta rule in torch, by tokens or in chunks
        state_space_formulas  the state space of Mamba-2 in torch, by tokens or in chunks
        recurrent_ops         the operations of recurrent layers in torch
        convolution_loops     causal convolutions, compiled
        memory_loops          memories of heads, compiled
        delta_loops           linear attention with a state, compiled
        state_space_loops     Mamba-2, compiled
    reference                 every operation in torch: the specification
    cpu_matmuls               matmuls on the CPU
    cpu_elementwise           activations on the CPU
    cpu_recurrent             recurrent layers on the CPU
    cpu_experts               mixtures of experts on the CPU
    token_masks               sets the logits of forbidden tokens to -inf
    compiled_bodies           which compiled functions a model needs
    cpu                       operations of a model on the CPU, compiled where it is faster
    providers                 interfaces of attention and matmuls that are not ours
    provided                  attention and matmuls of providers, over any other kernels
cuda/                         CUDA kernels with their launchers, and an emulator that runs them
    cache_folder              folder of compiled kernels (no torch)
    emulator/                 runs and checks CUDA kernels on a CPU, thread by thread (no torch)
        reports               errors of a kernel, with source lines (no torch)
        source                translates CUDA C++ for g++ (no torch)
        toolchain             g++, CUDA headers and cached libraries (no torch)
        arrays                arrays between guard pages (no torch)
        library               a built library, and calls of its kernels (no torch)
        arguments             checks of kernel arguments against the parameters (no torch)
        raw_module            a CUDA C++ source as callable kernels (no torch)
    features                  features that can be switched off (no torch)
    device/                   devices, compiler, streams, launches, CUDA graphs
        device                CuPy, imported when a host asks for a CUDA device
        compiler              compiles CUDA C++, and reports register use (no torch)
        thread_contexts       the CUDA context of each thread (no torch)
        dependent_launch      programmatic dependent launches (no torch)
        launch                launches on a GPU or on the emulator
        streams               CUDA streams, or the emulator's
        uploads               copies the arrays of a step to the device at once
        downloads             asynchronous copies from the device
        graphs                CUDA graphs of steps, and the sizes to capture
    attention/                attention over KV cache pages, and kernels that write them
        paged_kernels         shapes and dtypes that the paged kernels support
        cache_write           rotation, QK norm, and the write of keys and values
        block_copy            copies of partial blocks
        generation_plan       how generation attention is split over thread blocks (no torch)
        float_attention       attention in float32, for shapes that no other kernel supports
        generation_attention  attention of rows with one token
        warpgroup_attention   context attention with Hopper's wgmma
        context_attention     attention of rows with several tokens
        flash_attention       attention of the library flash-attn, on our pages
        flashinfer_attention  attention of the library FlashInfer, on our pages
        provider_libraries    finds the attention of other libraries
    norms                     residual add, RMSNorm, LayerNorm
    gemm/                     matmuls of few rows, and LoRA
        byte_rows             a weight in 8 bits, in the order in which CUDA kernels read it
        device_matrices       the forms in which CUDA kernels read a weight
        gemv                  matrix-vector products of up to a few rows
        gemv_int4             the same with a weight in 4 bits
        gemm                  matmuls of some more rows, and their split over blocks
        scaled_matmul         torch's matmul of a weight in 8-bit floats, on a GPU
        own_matmuls           selects the kernel for a number of rows
        lora                  LoRA on the tokens of a step
        matmul_choice         measures whether our matmul or torch's is faster
    activations               activations of MLPs, gated or not
    moe                       mixtures of experts: choice, sort, grouped matmuls
    expert_kernels            mixtures of experts on a GPU
    delta_rule                the gated delta rule: convolution, memories
    state_space               Mamba-2: convolution, memories, norm
    recurrent_kernels         recurrent layers on a GPU
    sampling/                 kernels from logits to tokens and log probabilities
        token_masks           bit masks of permitted tokens, applied to logits
        adjustments           bias, penalties and bans on logits
        sampling              samples one token per row
        log_probs             log probabilities of given tokens
        beam_step             the best continuations of beams
    kernels                   operations of a model on a GPU: which kernel runs each
    matrix                    compiles every kernel in every instantiation
ranks/                        one process per rank: its part of the model, and messages
    layout                    which part of the model a rank holds (no torch)
    frames                    messages on a socket (no torch)
    watch                     detects a failed rank (no torch)
    meeting                   how ranks find each other (no torch)
    links                     messages between the managers of all ranks (no torch)
    small_tensors             all-gather of small tensors over sockets
    collectives               collectives of tensor and pipeline parallelism
    world                     this rank's number, and the addresses of the others
    process_groups            the process groups of torch behind the collectives
memory/                       tensors that outlive a step, and the checkpoint files
    checkpoint/               the tensors of checkpoint files, read within limits and written
        untrusted_files       size and depth limits of checkpoint files (no torch)
        digest                a digest of a checkpoint, from samples
        tensor_sources        the tensors of a checkpoint by name; those of a state dict
        mapped_file           tensors of a safetensors file as memory of the file
        safetensors_reader    reads tensors from a folder of safetensors files
        safetensors_writer    writes a safetensors file tensor by tensor
    host_memory               pinned host memory
    slot_states               states of recurrent layers, by slot
    released_memory           memory of tensors, released and taken again
    kv_pool                   tensors of the KV cache
    cuda_kv_pool              tensors of the KV cache for CUDA kernels
    adapter_pool              tensors of the LoRA cache
    places                    where tensors of a checkpoint go (no torch)
    tensor_checks             errors for tensors with a wrong name, shape, dtype or value
    stored_matrices           matrices that are mapped, or copied as they are stored
    tensor_copies             copies tensors of a checkpoint to the storage of parameters
    weights                   parameters of a model, loaded by name
models/                       decoder networks, and the table of families
    batch                     a schedule as packed tensors
    gguf/                     GGUF files of llama.cpp as checkpoints
        blocks/               blocks of quantized elements, as GGUF files store them
            block_fields      float16 numbers and small integers in blocks
            grid_blocks       unpacks IQ1, IQ2 and IQ3: vectors of a grid
            block_types       unpacks blocks of all types to floats
        header                reads metadata, and the places of tensors, with checks
        metadata              checked reading of a file's keys
        split_files           headers of a model in several files
        architecture          a row of the table of GGUF architectures, and shared names (no torch)
        further_fields        config fields that several keys determine (no torch)
        kinds/                kinds of architectures of GGUF files
            gpts              rows for GPT-2, GPT-NeoX, StarCoder 1 and Falcon (no torch)
            mixtures          rows for mixtures of experts (no torch)
            linears           rows for linear attention (no torch)
            hybrids           rows for short convolutions and Mamba-2 (no torch)
        architectures         the table of architectures: keys and tensor names
        config                makes a config.json from a file's metadata
        row_orders            orders of rows in which a file differs from a checkpoint
        tensors               a file's tensors under the names of a checkpoint
        tokens                a file's vocabulary, end ids and chat templates
        pre_tokenizers        the table of pre-tokenizers of byte-level BPE
        tokenizer             makes a tokenizer from a file's metadata
        checkpoint            GgufCheckpoint: a file as the parts of a checkpoint
    fields                    checked reading of a checkpoint's config
    converted_tensors         tensors of a checkpoint with matrices in 8 or 4 bits
    quantized/                quantized safetensors checkpoints, read as floats
        mlx_options           the options of modules that MLX has quantized, from a config
        scheme_fields         how a checkpoint is quantized, and checks of the fields that say so
        integer_schemes       the schemes of GPTQ, AWQ and AutoRound
        vendor_schemes        the schemes of ModelOpt and Quark
        scheme                how a checkpoint is quantized, from its config
        matrices              quantized matrices, which return their rows as stored or as floats
        float4                matrices of 4-bit floats, with their rows as stored or in groups
        codebooks             matrices of bitsandbytes in 4 bits, checked
        mlx                   matrices that MLX has quantized, checked
        modelopt              matrices that only ModelOpt writes
        given_tensors         finds the tensors of a quantized matrix, and checks them
        formats               finds the quantized matrices among a checkpoint's tensors
        source                the tensors of a quantized checkpoint, as if they were floats
    other_layouts             tensors of MLX or transformers 5 in the layout of their family
    other_folders             describes a folder without a usable checkpoint (no torch)
    checkpoint_parts          reads a checkpoint from a folder or a GGUF file
    rope_scaling              rotary embeddings and their scaling
    recurrent/                kinds of recurrent layers
        kind                  the interface of these kinds
        delta_rule            linear attention with the gated delta rule
        short_convolution     gated convolutions over a few tokens
        state_space           state spaces of Mamba-2
    spec                      ModelSpec: all sizes and features of a network
    attention_options         windows and page dtypes that a caller chooses for a ModelSpec
    parameters                names and shapes of a network's parameters
    attention_rows            rows of attention's tensors that are stored in other orders
    splits                    which part of each parameter a rank holds
    families/                 the table of model families
        names                 tensor names of each family
        layer_types           which layers have a window, or rotary positions
        family                Family: the properties that set a model_type apart
        readers               readers of config fields that several families share
        base                  norms, spellings and families that others begin with
        kinds/                the families, by what sets them apart from Llama
            llamas            families close to Llama
            gemmas            families of Gemma
            layer_norms       families with LayerNorms
            gpts              GPT-J, StarCoder 1 and Falcon
            llama4            the family of Llama 4
            cohere_moe        the family of Cohere's mixtures of experts
            mixtures          families with mixtures of experts
            sinks             families with attention sinks: gpt-oss, Granite with windows
            corrected_mixtures  mixtures with a learned correction of scores
            linears           families with linear attention: Qwen3-Next, Qwen3.5
            convolutions      families with short convolutions: LFM2
            state_spaces      families with state spaces: Granite 4, Bamba
            blocks            families with layers of one part each: Nemotron-H
            latents           families with latents: DeepSeek V2, V3
            own_code          families that are published with code of their own
        table                 FAMILIES: all of them, by model_type
        wrappers              text models inside of multimodal checkpoints
        config_fields         fields of a config that do not matter, or that are refused
        places                the place of each checkpoint tensor in our parameters
    read_spec                 makes a ModelSpec from a config.json
    conversion                writes a checkpoint as a folder of safetensors
    decoder/                  the network of a ModelSpec, on weights and kernels
        lora_modules          the modules of a layer that LoRA adapters may change
        layer_tensors         the tensors of a layer, looked up once
        position_tables       cosines, sines and query temperatures of all positions
        attention_inputs      normed heads, fewer pages
        latent_attention      attention to the latents of DeepSeek V2
        recurrent_layer       the tensors of a recurrent layer
        expert_mixture        outputs of experts, with those of a shared MLP
        token_embedding       the embeddings of a step's tokens
        token_inputs          further inputs of layers for each token
        split_norms           norms over all heads, where ranks have some each
        network               CheckpointModel: the forward pass of a decoder
    model                     the Model protocol, and load_model
    hf/                       models that transformers computes, with our attention
        library               imports transformers when it is needed (no torch)
        sizes                 chooses whether transformers computes a model, and reads its sizes
        attention             the attention that transformers calls
        probe                 refuses by name what our attention cannot compute
        fixed_rope            rotary embeddings that depend on the longest sequence
        linears               replaces linear layers by our matmuls
        experts               replaces experts by ours, if their layout is known
        network               TransformersModel: a network of transformers as a Model
        loading               loads a checkpoint folder through transformers
decoding/                     from logits to tokens, and the end of an output
    deferred                  a value that is computed only if it is used (no torch)
    stop_words                finds the first stop word in a growing output
    end_rule                  decides where an output ends
    prompt_lookup             speculative decoding: prompt lookup
    lines                     rows of a table by sequence and beam
    processors/               logits post-processors: rows and calls
        rows                  the rows that a logits post-processor gets
        stream_watch          detects work on another stream than the model's
        logits                calls logits post-processors, and handles their failures
        kernel_signature      parameters of a kernel over rows
        raw_kernel            a user's CUDA kernel as logits post-processor
    guided/                   guided decoding: JSON schemas and grammars as token masks
        schema_numbers        number limits of JSON schemas for the parser (no torch)
        schema_references     resolves references of JSON schemas (no torch)
        schema_overlap        checks if two JSON schemas exclude each other (no torch)
        schema_keywords       keywords and formats that the parser enforces (no torch)
        schema_complement     the complement of a JSON schema (no torch)
        json_schema           turns JSON schemas into enforceable grammars (no torch)
        gbnf                  converts grammars in GBNF to Lark (no torch)
        grammar_matcher       compiles a grammar, in this or a child process (no torch)
        grammar_trial         tries a grammar in a child process (no torch)
        grammar_start         where the text of a grammar begins after a thought (no torch)
        grammar_masks         token masks of a grammar's state
        guided                GuidedDecoding: grammars compiled in the background
    sampling/                 samples a token from a row of logits
        random_numbers        random numbers from a seed and a position
        adjustments           bias, penalties and bans on logits
        choice                greedy or random choice in one row
        best_tokens           top-k tokens of rows
        sampling              samples one token per row
        device_sampling       which rows a device can sample itself
        rejection             rejection sampling of draft tokens
    search/                   beam search
        beam_search           beams, and several outputs of one request
        beam_state            beams as data, and restored from it
executor/                     runs one step: input arrays, forward pass, choice of tokens
    packed_rows               a batch as arrays on the CPU, padded or split (no torch)
    sequence_tables           tokens and blocks of each sequence
    step_in_flight            a step that has been started
    choice/                   from the logits of a step to its tokens
        prompt_scores         log probabilities of prompt tokens
        gathered_logits       which logits each sequence asks for
        drawn_drafts          accepts or replaces draft tokens that were sampled
        top_tokens            log probabilities of the top tokens
        token_chooser         chooses the tokens of a step on the CPU
        device_chooser        chooses the tokens of a step on a device
    runner                    runs the forward pass on the CPU
    captured_steps            CUDA graphs of steps, with and without adapters
    device_runner             runs the forward pass on a device
    result_message            results of a step as a message to other ranks
    forward_thread            runs forward passes on a thread of their own
    out_of_memory             splits a batch that does not fit into memory
    torch_executor            TorchExecutor: runs a step on one device
    staged_executor           runs a pipeline stage
    rank_executor             runs a step on one of several ranks
loop/                         the token loop and its active requests
    request_times             timestamps of a request (no torch)
    active_request            a request from admission to its final response
    limits                    limits of a request's lengths (no torch)
    admission                 admits or refuses a request
    allocation                allocates blocks for a decision, and freezes it as a Schedule
    scheduler_call            calls the schedulers, and checks their answers
    active_state              active requests as data, and restored from it
    adapters                  adapters of active requests
    adapter_state             adapters' state as data, and copies for trials
    extras                    log probabilities and logits until they are sent
    responses                 builds the responses of requests
    request_table             the table of active requests
    confirmation              applies the result of a step to its requests
    token_loop                TokenLoop.iterate(), one iteration in about 25 lines
    decision_preview          predicts the next decision on copies
assembly/                     builds a loop from options and a checkpoint
    field_checks              which values of single options are valid (no torch)
    provider_options          which providers of attention and matmuls are valid (no torch)
    options                   which combinations of options are valid (no torch)
    sizing                    size of the KV cache and longest sequence
    adapter_sizing            size of the LoRA cache
    stateful                  options of a model that keeps a state for each sequence
    blueprint                 builds schedulers, caches and the loop
    loading                   loads a checkpoint, natively or through transformers
    attention_trial           times attention of providers, and ours
    attention_choice          chooses who computes attention in each phase
    rank_options              options and checkpoints, which must be equal on all ranks
    ranks                     connections to other ranks, and agreement on sizes
    backend                   device, kernels and memory of a model: what all devices share
    cpu_backend               the same on a CPU
    device_backend            the same on a GPU or the emulator
    assemble                  builds a loop from checked options and a model
recorder/                     recordings of a loop's inputs and decisions; the black box
    requests                  requests in a recording, as JSON
    values                    values in a recording, as JSON
    limits                    limits of numbers in a recording
    difference                describes the difference of two schedules
    recording_file            a recording and its file format
    sizes                     memory that the black box's records take
    kept                      records that the black box keeps
    black_box                 the black box: the last iterations, in memory
    black_box_file            the file of a black box, readable by its owner (no torch)
    taps                      a host and an executor that record all calls
    recorder                  Recorder: writes down a run
host/                         calls the host's four callbacks safely
    loop_host                 the interface of a host for a manager's worker
    timers                    times of callbacks
    received_requests         checks and admits what GetInferenceRequests returned
    retries                   delays GetInferenceRequests after an error
    preparation               prepares logits post-processors
    background_jobs           long jobs in pieces, between or beside steps
    adapter_loader            loads adapters on threads
    broadcast                 marks a callback whose results go to all ranks
    cache_invalidation        when cached blocks are stale (no torch)
    journal_seam              where a journal holds responses back (no torch)
    callback_host             CallbackHost: calls the four callbacks
    packed_requests           requests as bytes
    rank_messages             new requests and stops as a message to other ranks
    rank_answers              compares callback results between ranks
    ranked_host               callbacks of a host whose model runs on several ranks
journal/                      what was accepted and sent, on disk, for a new process
    records                   records with checksums in a file (no torch)
    entries                   unfinished requests, as the records say (no torch)
    segments                  the files of a journal's folder (no torch)
    journal                   Journal: writes records, and syncs them to the disk (no torch)
    accepted                  accepted requests and responses as bytes
    journaled_host            a host whose requests and responses are written down
    resuming                  where the requests of a journal continue
    opening                   opens the journal of a manager
    main                      runs `gptmanager journal`
    arguments                 arguments of `gptmanager journal` (no torch)
manager/                      GptManager: the worker thread around the loop
    inbox                     commands from other threads to the worker
    inspection                audit and explain: block owners, reasons for waiting
    watching                  callables that watch the loop
    rank_calls                calls that all ranks make together
    weight_updates            replaces weights between two iterations; sleep
    recovery                  recovery after an iteration that raised
    stall_watch               detects a loop that makes no progress
    ending                    ends a loop that finished, failed or hangs
    worker                    the worker thread
    loop_questions            the questions that a loop answers between two iterations
    generation_control        pauses, sleep, and new weights
    gpt_manager               GptManager
gptmanager                    the public names
callbacks/                    ready-made callbacks, built on the public names only
    text/                     tokenizers, chat templates and text streams
        checkpoint            tokenizer and end tokens of a checkpoint
        text_encoder          tokenizes prompts, and finds those that are too long
        text_stream           decodes tokens to text as they arrive
        stop_strings          stop strings (no torch)
        stopped_text          the text of one output, up to its first stop string
        template_rendering    renders chat templates, in this or a child process (no torch)
        template_process      finds chat templates; the process that renders them
        control_tokens        keeps control tokens out of clients' texts (no torch)
        chat_template         ChatTemplate: messages as prompt tokens
    answers/                  answers of chat models: thoughts, content and tool calls
        parsing/              finds thoughts, content and calls in the text of a model
            answer_parts      the parts of an answer: thoughts, content, calls (no torch)
            text_scan         finds tags and ends of JSON objects in pieces of text (no torch)
            stepwise_parser   base of the parsers of an answer in pieces (no torch)
            dropped_tags      drops tags around the content of an answer (no torch)
            harmony_parser    parses the harmony format of gpt-oss (no torch)
            call_parser       finds tool calls in the model's text (no torch)
            calls_in_thought  finds calls after a thought that is not closed (no torch)
            thought_tags      parses thoughts in tags, such as <think> (no torch)
            python_values     values in Python's syntax as JSON (no torch)
            json_calls        parses calls that are JSON objects (no torch)
            argument_list     parses calls with a list of arguments (no torch)
        tools                 tools that a model may call (no torch)
        schema_types          types of values that a JSON schema allows (no torch)
        call_grammar          grammars of answers with calls (no torch)
        value_tags            grammar and parser of calls with a tag for each value (no torch)
        tool_format           ToolFormat: the interface of a format of calls (no torch)
        tool_formats/         formats of calls: a parser and a grammar for each
            hermes            the format of Hermes and Qwen (no torch)
            llama3            the formats of Llama 3 and Functionary (no torch)
            json_lists        JSON objects after a tag: Granite, Cohere, Apertus... (no torch)
            mistral           the formats of Mistral (no torch)
            tagged_values     a tag for each value: Qwen3-Coder, Seed-OSS, GLM... (no torch)
            kimi              the format of Kimi K2 (no torch)
            solar_open        the format of Solar Open (no torch)
            gemma4            the formats of Gemma 4 and FunctionGemma (no torch)
            deepseek          the formats of DeepSeek R1, and V3 to V4 (no torch)
            pythonic          calls in Python's syntax: Llama, LFM2, OLMo 3 (no torch)
            harmony           the format of gpt-oss (no torch)
            formats           all formats of calls, and the one of a chat template (no torch)
        reasoning             the format of a model's thoughts, by its chat template
    queue/                    request queues with futures
        wakeups               wakes asyncio waiters from another thread
        result                GenerationResult: all responses of a request combined
        generation            Generation: a future and a token stream
        output_texts          decodes the outputs of requests with `stop`
        pending_requests      pending requests in order of priority
        attachment            what a queue needs from its manager
        request_queue         RequestQueue: three callbacks as a queue with futures
        async_request_queue   AsyncRequestQueue: the same for asyncio
    sinks/                    statistics as log records, JSON lines, Prometheus metrics
        observers             several statistics callbacks as one
        json_lines            statistics as JSON lines
        logging               statistics as log records
        metric_names          names of the metrics, also in other servers (no torch)
        metric_counts         counters behind the metrics
        registry_collector    metrics of all sinks of a registry (no torch)
        prometheus            metrics for Prometheus (no torch)
    ranks/                    rank 0's callback results on all ranks
        mpi_transport         broadcast by MPI
        broadcast             broadcasts rank 0's callback results
    live_page/                the live page: a manager's schedule in a browser
        tap                   collects events on the loop's thread
        rows                  events of requests as rows of the page
        feed                  sends events to browsers
        page_server           LivePage: serves the page
    processors/               ready-made logits post-processors
        token_rules           allows, forbids or prefers tokens
        temperature_schedule  a temperature that changes by position
        watermark             a statistical watermark
        forced_prefix         forces the first tokens of an output
        token_bytes           bytes of each token of a tokenizer (no torch)
        banned_texts          forbids texts, however they are tokenized
        guided_decoding       guided decoding for a checkpoint's tokenizer
    longest_request           how many tokens a request may have in a running manager
    adapters/                 LoRA adapters that PEFT saved
        name_pattern          regular expressions with a limit of steps (no torch)
        peft_config           reads adapter_config.json
        peft_adapter          reads a PEFT adapter as tensors of a request
    start                     generate(): completions in three lines
bindings/                     tensorrt_llm.bindings' interface for existing hosts
    tensor_names              names of tensors (no torch)
    executor                  the names of tensorrt_llm.bindings.executor
    requests                  its requests and named tensors
    trt_gpt_model             its options, translated to ours
    memory_counters           MemoryCounters: bytes that managers use (no torch)
    gpt_manager               its GptManager, with both orders of arguments
testing/                      helpers for tests of hosts and schedulers
    scripted_executor         an executor without a model
    hosts                     ScriptedModel and RecordingCallbacks
    contract                  ContractChecker: checks the callbacks' contract
    scenarios                 random scenarios for schedulers
    rules                     rules that a scheduler must keep
    scenario_run              runs a scenario in the real loop
    conformance               assert_conforms: checks a scheduler
replay/                       runs a recording again, and finds the first difference
    replaying                 replays a recording
    request_table             writes the requests of a replayed run as CSV
    main                      runs `gptmanager replay`
    arguments                 arguments of `gptmanager replay` (no torch)
simulator/                    the real loop with a virtual clock and without a model
    load                      arrival times and lengths of requests
    known_outputs             an executor that returns outputs known in advance
    cost_model                predicts how long a step takes
    figures                   results of a simulated run
    stages                    pipeline stages in virtual time
    simulation                simulates a run
    comparison                the simulated manager: recorded or hypothetical options
    report                    the report of `gptmanager simulate`
    main                      runs `gptmanager simulate`
    arguments                 arguments of `gptmanager simulate` (no torch)
picture/                      drawings of a schedule: SVG, zoomable page, Perfetto trace
    trace                     what each request did in each iteration (no torch)
    wait_reporter             why the first waiting request waits (no torch)
    builder                   builds a trace from schedules
    observer                  builds a trace from a running loop
    recorded                  builds a trace from a recording
    svg                       SVG shapes and styles
    layout                    positions and zoom of a drawing
    rows                      draws one row per request
    load                      draws batch size, tokens and memory
    drawing                   draws a schedule
    zoom_page                 a zoomable HTML page
    perfetto                  a trace for Perfetto
    main                      runs `gptmanager picture`
    arguments                 arguments of `gptmanager picture` (no torch)
commands/                     `gptmanager run`, `chat`, `convert` and `models`
    latencies                 latency percentiles
    follow                    runs a command on ranks other than 0
    run/                      `gptmanager run`: a file of requests
        adapter_folders       loads the adapters that requests name
        chat_prompts          messages of a chat in a line, as token ids
        line_fields           fields of a line of the requests file
        requests_file         reads the requests file
        results_file          writes the results file
        progress_display      the progress display
        watch                 watches a run from the terminal's thread
        main                  runs `gptmanager run`
        arguments             arguments of `gptmanager run` (no torch)
    chat/                     `gptmanager chat`: a conversation with a model
        conversation          messages of a chat, and the answers to choose from (no torch)
        message_lines         a message from the lines that a person types (no torch)
        answers               answers in thoughts and content while they are generated
        chat_model            answers the messages of a chat with a manager
        slash_commands        the commands of a chat, such as /clear (no torch)
        interrupts            Ctrl-C stops an answer and not the program (no torch)
        transcript            an answer as it is printed, with its thoughts (no torch)
        terminal_view         a chat on a terminal
        piped_view            a chat through pipes
        session               asks and answers until the end
        arguments             arguments of `gptmanager chat` (no torch)
    checkpoints/              `gptmanager convert` and `gptmanager models`
        convert_main          runs `gptmanager convert`
        convert_arguments     arguments of `gptmanager convert` (no torch)
        models_main           runs `gptmanager models` (no torch)
        models_arguments      arguments of `gptmanager models` (no torch)
server/                       a manager behind HTTP and gRPC
    extras                    imports of optional dependencies (no torch)
    errors                    errors as clients get them
    http/                     HTTP: bodies, keys, responses, connections
        key_file              keys, and the file with named ones (no torch)
        access                settings of access: hosts, keys, limits
        warning_header        the Warning header (no torch)
        request_log           a line of the log for each request, and its id (no torch)
        responses             JSON responses, errors, server-sent events (no torch)
        hosts                 checks the Host and Origin headers (no torch)
        keys                  checks API keys (no torch)
        idempotency           reads the header Idempotency-Key (no torch)
        json_text             parses JSON with limited memory (no torch)
        body                  reads bodies within limits (no torch)
        connections           limits the number of connections (no torch)
        http_protocol         HTTP/1.1 with limits (no torch)
        listening             binds a port or a Unix socket (no torch)
    chat_settings             settings of chats: templates, thoughts (no torch)
    model_settings            settings of the model and its adapters (no torch)
    settings                  ServerSettings, checked
    fields                    fields of JSON bodies: types, limits, descriptions (no torch)
    request_fields            checks a body's fields, and lists ignored ones (no torch)
    context_length            checks that prompt and output fit the context
    engine/                   shared by all protocols: manager, calls, adapters, metrics
        model_card            name, limits and tokenizer of the served model
        adapters              adapters that clients may name
        call                  all requests of one call
        restored_responses    responses to restored requests (no torch)
        kept_calls            calls that clients may join again
        admission             limits on the requests that run and wait
        metrics               metrics of the server (no torch)
        engine                Engine: runs calls on the manager
        throughput            a line of the log every ten seconds, while busy
    health                    /health and readiness
    live_page                 the live page of the server (no torch)
    text/                     shared by the text protocols: outputs, structured answers
        structured            response formats: schema, pattern, choice, grammar
        generation_fields     sampling and output fields of a body
        log_probs             log probabilities in the shapes of OpenAI
        outputs               text and finish reason of one output
        sampling              makes sampling parameters from fields
        processors            logits post-processors of a request
        answer                all outputs of a request
    chat/                     chat messages to prompts, and answers to messages
        messages              checks the messages of a chat
        tools                 reads the tools of a request (no torch)
        functions             OpenAI's older `functions`, as tools
        content_tokens        log probabilities of the tokens in an answer's content
        chat_answer           an answer as a message, or as deltas
        embedding_parts       parts of messages that are embeddings
        chat_prompt           renders messages as prompt tokens
        chat_call             the one path from the fields of a chat to its generation
        event_answer          an answer as named events, or in one piece
    openai/                   OpenAI's endpoints
        models                /v1/models, and loading of adapters
        json_answer           the JSON of an answer, in one piece or as chunks
        completions           /v1/completions
        chat                  /v1/chat/completions
        response_input        items and fields of /v1/responses as those of a chat
        response_writer       items and events of /v1/responses (no torch)
        response_store        the latest responses (no torch)
        item_references       stored items instead of their ids (no torch)
        responses             /v1/responses
        tokenization          /tokenize and /detokenize
    anthropic/                Anthropic's endpoints
        message_input         messages and fields of /v1/messages as those of a chat
        message_writer        blocks and events of /v1/messages (no torch)
        messages              /v1/messages and count_tokens
    triton/                   Triton's protocol over HTTP and gRPC
        errors                errors in Triton's protocol
        messages              a call and its responses, for HTTP and gRPC (no torch)
        datatypes             tensor bytes as numbers (no torch)
        tensors               checks the input tensors of a model (no torch)
        statistics            counts and durations of calls (no torch)
        token_model           tensorrt_llm: token ids to token ids
        text_model            ensemble and tensorrt_llm_bls: text to text
        inference             runs a call
        repository            metadata and configurations of models
        described             /v2 in the OpenAPI document
        http_messages         JSON and binary bodies of infer calls (no torch)
        http                  /v2 routes
        wire                  checks protobuf bytes before parsing (no torch)
        grpc_messages         converts protobuf messages
        grpc_log              lines of the log for gRPC calls (no torch)
        grpc_service          the gRPC service
    openapi                   the OpenAPI document
    app                       all routes as one application
    serving                   starts and stops a server
    log_output                writes the log without waiting for its reader (no torch)
    main                      runs `gptmanager serve`
    arguments                 arguments of `gptmanager serve` (no torch)
bench/                        benchmarks, also of other libraries
    names                     names of benchmarks' choices (no torch)
    timing                    times a call, and watches the time limit
    roofline                  peak rates of a device, and lower bounds of a model's step
    machine                   describes the machine that was measured
    load                      random requests and models
    adapter_load              random adapters
    engine                    runs a load through a manager
    peers/                    other libraries on the same load
        transformers_peer     transformers on the same load
        gguf_writer           writes random weights as a GGUF file
        own_script            this library in a process of its own: the script
        llama_cpp_peer        llama.cpp on the same weights: its benchmarks and ours
        vllm_cpu_script       vLLM on the same load: the script (no torch)
        vllm_peer             vLLM on the same load: the process
    experts                   `gptmanager bench experts`: a mixture of experts on the CPU
    peer_throughput           `gptmanager bench`: throughput next to a peer
    kernels/                  `gptmanager bench kernels`: each kernel next to its peers
        cases                 a case: minimum work, contenders, reference result
        paged_rows            sequences in pages, for attention cases
        attention_peers       other libraries' attention on the same pages
        attention_cases       attention
        matmul_cases          matmuls
        adapter_cases         LoRA
        expert_cases          mixtures of experts
        recurrent_cases       the gated delta rule and Mamba-2
        token_cases           kernels over tokens or blocks
        sampling_cases        sampling
        logits_cases          kernels before and after sampling
        kernel_runs           checks and times a case
        benchmark             the whole kernel benchmark
    end_to_end/               `gptmanager bench e2e`: a whole model on a device, in parts
        dense_reference       a Llama without a cache, as reference
        device_trace          how busy a GPU is
        serving_parts         parts: decode steps, loads, a small KV cache
        workbench             device, model and manager of a benchmark
        benchmark             the whole end-to-end benchmark
    table                     reports as tables
    main                      runs `gptmanager bench`
    arguments                 arguments of `gptmanager bench` (no torch)
    environment_main          runs `gptmanager env`
    environment_arguments     arguments of `gptmanager env` (no torch)
cli                           the command line (no torch)
__main__
"""

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("gptmanager", "callbacks", "cuda")
MAIN = ("gptmanager", "__main__")  # modules for everybody, in no package
Statement = ast.Import | ast.ImportFrom | ast.Constant
LATER = re.compile(r"gptmanager(\.\w+)+(:\w+)?")  # MODULE:NAME, or a module where one is loaded:
LOADERS = {"lazy_names", "load_extra"}
TEST_IMPORT = re.compile(r"^ *(?:from|import) +(?:\w+\.)*(test_\w+)", re.MULTILINE)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def layers(text: str = LAYERS) -> dict[str, str]:
    """Module -> description, in order. Names are those below gptmanager, as `cuda.device`."""
    known: dict[str, str] = {}
    open_packages: list[tuple[str, str]] = []  # around the line that is read, with descriptions
    for line in (*filter(None, text.splitlines()), ""):
        depth = (len(line) - len(line.lstrip())) // 4
        while len(open_packages) > depth:
            package, of_package = open_packages.pop()
            known[package] = of_package
        name, _, description = line.strip().partition(" ")
        name = ".".join([*(package for package, _ in open_packages[-1:]), name])
        assert name.removesuffix("/") not in known, f"{name} is in the list twice"
        if name.endswith("/"):
            open_packages.append((name.removesuffix("/"), description.strip()))
        elif name:
            known[name] = description.strip()
    return known


def modules(root: Path) -> dict[str, Path]:
    """Module -> file, for every file of the library."""
    found = {}
    for path in (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        found[name.removeprefix("gptmanager.")] = path
    return found


def imports(
    node: ast.AST, in_function: bool = False, loads: bool = False
) -> Iterator[tuple[Statement, bool]]:
    """Every import below `node`, and whether it stands in a function; a name in a string is
    imported later, wherever it stands.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant):
            text = str(child.value)
            if LATER.fullmatch(text) and (loads or ":" in text):
                yield child, False
        elif isinstance(child, Statement):
            yield child, in_function
        else:
            loads_here = isinstance(child, ast.Call) and getattr(child.func, "id", "") in LOADERS
            yield from imports(
                child, in_function or isinstance(child, FUNCTIONS), loads or loads_here
            )


def targets(statement: Statement, package: str, known: dict[str, str]) -> list[str]:
    """What a statement imports; `from a import b` means a.b where that is a module."""
    if isinstance(statement, ast.Constant):
        return [statement.value.partition(":")[0]]
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    source = resolve_name("." * statement.level + (statement.module or ""), package)
    names = (f"{source}.{alias.name}" for alias in statement.names)
    return sorted({name if name.removeprefix("gptmanager.") in known else source for name in names})


def complaint(module: str, target: str, in_function: bool, known: dict[str, str]) -> str | None:
    """Why `module` must not import `target` there, if so."""
    top, _, rest = target.partition(".")
    if top in ("callbacks", "cuda"):
        return f"imports {target}, which makes a second copy: write gptmanager.{target}"
    if top == "cupy" and not in_function:
        return "imports cupy before a CUDA device is asked for"
    if top == "torch" and "no torch" in known[module]:
        return "imports torch, and its line says that it does not"
    if top != "gptmanager":
        return None
    name = rest or top
    if in_function:
        return f"imports {name} inside a function"
    if name not in known:
        return f"imports {name}, which is not in LAYERS"
    if list(known).index(name) >= list(known).index(module):
        return f"imports {name}, which does not stand above it"
    return None


def violations(root: Path, known: dict[str, str]) -> list[str]:
    """Every line of the library that breaks a rule."""
    found = []
    for module, path in modules(root).items():
        where = path.relative_to(root).as_posix()
        if module not in known:
            found.append(f"{where}: {module} is not in LAYERS")
            continue
        package = f"gptmanager.{module}".removesuffix(".gptmanager")
        package = package if path.name == "__init__.py" else package.rpartition(".")[0]
        for statement, in_function in imports(ast.parse(path.read_text("utf-8"))):
            for target in targets(statement, package, known):
                if why := complaint(module, target, in_function, known):
                    found.append(f"{where}:{statement.lineno}: {why}")
    return found


def test_every_import_points_up_the_list():
    # NVIDIA has a namespace package of this name, so ours has no `__init__`
    assert modules(ROOT).keys() | {"cuda"} == layers().keys()
    found = violations(ROOT, layers())
    assert not found, "\n".join(found)


def packages() -> dict[str, str]:
    """Path -> description, for each package, its sub-packages, and each module outside of any."""
    known, files, found = layers(), modules(ROOT), {}
    folders = {name for name, path in files.items() if path.name == "__init__.py"} | {"cuda"}
    for top in (name for name in known if "." not in name and name not in MAIN):
        inside = [name for name in known if name.startswith(f"{top}.") and name in folders]
        for name in (top, *inside):
            path = name.replace(".", "/") + ("/" if name in folders else ".py")
            found[path] = known[name].replace(" (no torch)", "")
    return found


PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_page_has_every_package_in_its_order():
    rows = re.findall(r"^\| `([a-z_/.]+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert rows == list(packages().items())


def test_the_packages_are_the_folders():
    inside = {path.name for path in (ROOT / "gptmanager").iterdir() if path.name != "__pycache__"}
    data = {"__init__.py", "__main__.py", "py.typed", "statistics.schema.json"}
    top = {path.removesuffix("/") for path in packages() if "/" not in path[:-1]}
    assert top - {"callbacks", "cuda"} == inside - data
    assert len(inside - data) <= 33


def test_a_level_has_at_most_16_modules():
    folders = {path.parent for path in modules(ROOT).values()} - {ROOT / "gptmanager"}
    sizes = {
        folder.relative_to(ROOT).as_posix(): len({*folder.glob("*.py")} - {folder / "__init__.py"})
        for folder in folders
    }
    assert {folder: size for folder, size in sizes.items() if size > 16} == {}


def test_every_path_on_the_page_exists():
    paths = re.findall(r"`([a-z_]+(?:/[a-z_]*)*(?:\.py)?)`", PAGE)
    paths = {path for path in paths if "/" in path or path.endswith(".py")}
    assert len(paths) > 30
    assert [
        path for path in paths if not any((r / path).exists() for r in (ROOT, ROOT / "gptmanager"))
    ] == []


def test_every_answer_to_where_is_exists():
    lines = (ROOT / "tests" / "where_is.txt").read_text(encoding="utf-8").splitlines()
    answers = [line.rpartition(" | ")[2] for line in lines if not line.startswith("#")]
    assert len(answers) >= 45 and len(answers) == len({*answers})
    assert [path for path in answers if not (ROOT / path).exists()] == []


def test_tests_are_in_folders_and_no_test_imports_another():
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert sum(path.parent == ROOT / "tests" for path in files) <= 25
    imported = {path.name: TEST_IMPORT.findall(path.read_text("utf-8")) for path in files}
    assert {name: tests for name, tests in imported.items() if tests} == {}


ABOVE = "which does not stand above it"
PLANTED = [
    ("gptmanager/low.py", "from gptmanager.high import x", f"imports high, {ABOVE}"),
    ("gptmanager/low.py", "from gptmanager import high", f"imports high, {ABOVE}"),
    ("gptmanager/low.py", "if x:\n    from .high import x", f"imports high, {ABOVE}"),
    ("gptmanager/low.py", "from gptmanager import Manager", f"imports gptmanager, {ABOVE}"),
    ("gptmanager/pack/a.py", "from gptmanager.pack import x", f"imports pack, {ABOVE}"),
    ("gptmanager/pack/a.py", "from ..high import x", f"imports high, {ABOVE}"),
    ("gptmanager/high.py", "from gptmanager.lost import x", "imports lost, which is not in LAYERS"),
    ("gptmanager/lost.py", "", "lost is not in LAYERS"),
    ("gptmanager/high.py", "import cuda.op", "imports cuda.op, which makes a second copy"),
    ("gptmanager/high.py", "from callbacks import x", "imports callbacks, which makes a second"),
    ("gptmanager/high.py", "def f():\n    from .low import x", "imports low inside a function"),
    ("cuda/op.py", "def f():\n    import gptmanager.low", "imports low inside a function"),
    ("cuda/op.py", "import cupy", "imports cupy before a CUDA device is asked for"),
    ("gptmanager/low.py", "x = 'gptmanager.high:main'", f"imports high, {ABOVE}"),
    (
        "gptmanager/high.py",
        "lazy_names(x, {'gptmanager.lost': 1})",
        "imports lost, which is not in",
    ),
    ("gptmanager/low.py", "def f():\n    import torch", "imports torch, and its line says"),
]


@pytest.mark.parametrize(("file", "text", "why"), PLANTED)
def test_a_planted_violation_is_found(tmp_path, file, text, why):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)

    found = violations(
        tmp_path, layers("low (no torch)\npack/\n    a\ncuda/\n    op\nhigh\ngptmanager")
    )

    assert len(found) == 1 and found[0].startswith(file) and why in found[0]


def test_what_is_allowed_is_not_reported(tmp_path):
    (tmp_path / "gptmanager/pack").mkdir(parents=True)
    (tmp_path / "gptmanager/low.py").write_text("import numpy\n")
    (tmp_path / "gptmanager/pack/a.py").write_text("import torch\nfrom ..low import x\n")
    (tmp_path / "gptmanager/pack/__init__.py").write_text("from .a import x\n")
    (tmp_path / "gptmanager/high.py").write_text(
        "x = 'gptmanager.lost'\nfrom gptmanager import low, pack\nfrom gptmanager.pack import a\n"
        "def f():\n    import cupy\n    import transformers\n"
    )

    assert violations(tmp_path, layers("low (no torch)\npack/\n    a\nhigh")) == []
