"""The architecture: one total order, in which a module imports only names that stand above it.

A package stands in one piece, and so does a sub-package: they have an order too, and no two import
each other. An `__init__` counts as below its modules, which it re-exports. `no torch` in a
description is checked too. docs/architecture.md shows both levels of packages in the same words.
"""

import ast
import re
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

LAYERS = """
errors                        every error, in one tree
environment/                  what the library runs in: its distribution, the limits of the machine
    lazy_names                names of a package that are loaded when they are first used (no torch)
    distribution              the package as pip knows it (no torch)
    control_groups            limits of containers, and of systemd (no torch)
    cores                     how many cores this process may use (no torch)
    memory                    how much memory is free, and what has been freed given back (no torch)
lifecycle/                    a manager's states; its clock, log, latch and watchdog
    callables                 callables of a host: ordinary functions, done on return (no torch)
    clock                     the system's clocks, whatever becomes of the module time (no torch)
    log                       the library's logger, for code that must go on (no torch)
    child_loop                answers questions in a process of its own (no torch)
    child_process             asks them, bounded in time and memory (no torch)
    latch                     an event that signal handlers may wait for (no torch)
    watchdog                  a callback that overstays its budget
    state                     the states of a manager, and its health
arguments                     arguments of constructors, checked by name (no torch)
config                        what a host configures, and the enums of the contract (no torch)
terminal/                     what commands share: arguments, and texts that a terminal may show
    printable                 texts from anywhere, as a terminal may show them (no torch)
    streams                   standard streams that are closed, full, or read by nobody (no torch)
    live_region               the last lines of a terminal, redrawn in place (no torch)
    progress                  bars for what takes long (no torch)
    tables                    reports of lines and tables, for people or as JSON (no torch)
    arguments                 what a word on the command line must be (no torch)
    options                   options that several commands have (no torch)
request/                      what is known of a request before it runs
    post_processor            the logits post-processor of a request (no torch)
    input_rows                rows of numbers that a request brought, known by their digest
    sampling_params           how a request's tokens are chosen (no torch)
    output_options            how a request wants its output (no torch)
    llm_request               what schedulers and the KV cache know of a request (no torch)
    inference_request         what a host gives and gets: InferenceRequest, NamedTensor
    pieces                    work that may rest between its pieces
    read_tensors              one typed value out of whatever a host put under a name
    adapter                   LoRA matrices of a task, checked
kv_cache/                     who holds which block
    attention_window          positions a sequence keeps, in which of its blocks (no torch)
    block                     blocks and who owns them (no torch)
    prefix_tree               blocks found again by the tokens they hold (no torch)
    eviction                  which of the blocks that nobody holds goes first (no torch)
    tiers                     free blocks keep what they hold, here and then on the host (no torch)
    needs                     how many blocks a request will want (no torch)
    lookups                   what of the prompts that wait is cached (no torch)
    reuse                     what a new sequence finds, and what one that ends leaves (no torch)
    sequences                 which sequence holds which block (no torch)
    manager                   whether there are blocks for what a scheduler wants (no torch)
    state                     the accounts as data, and back (no torch)
peft_cache/                   which adapters are cached, and in which pages
    layout                    how large pages are, and which row of an adapter lies where (no torch)
    pages                     the pages of one level, and who has them (no torch)
    manager                   which adapters are cached, and for which requests (no torch)
    state                     the accounts as data, and back (no torch)
    work                      what is to be read, written and copied, and that it was
scheduler/                    who runs
    waiting                   why a policy leaves a request out
    adapter_pages             whether the adapters of several requests fit together (no torch)
    bulk_counts               the needs of many requests in one call (no torch)
    reuse_delay               which contexts wait for what another is about to compute (no torch)
    capacity                  which active requests get memory (no torch)
    max_utilization           the same where requests may be paused for others (no torch)
    reuse_credit              how much of a context that begins is cached (no torch)
    chunk_sizes               a step's tokens, shared out over contexts (no torch)
    micro_batch               which of those run now, and how much of their context (no torch)
    simple                    the two as one (no torch)
statistics                    the statistics of an iteration
step                          the values that pass between loop, executor and host
kernels/                      every operation of a step in torch, and faster ones for CPUs
    torch_operations          torch's operations, told one by one
    simd/                     what no operation owns: lanes, dtypes, threads, machine code
        lanes                 SIMD intrinsics for Numba
        dtypes                lanes of any dtype, widened and rounded on their way
        pairs                 dot products of bfloat16 pairs, and where they are fast
        threads               compiled code in torch's own threads
        machine_code          bodies as machine code that is kept on disk
    compilation               bodies compiled on all cores (no torch)
    captured_step             the tasks of a generation step, captured and run again
    token_loops               work token by token: rotation, KV write, norms, activations
    gemm/                     matmuls of tokens with packed matrices
        packed_matrix         a weight in the order in which matmuls read it
        small_matmul          small matmuls in register tiles
        matrix_tiles          matmuls with packed matrices in register tiles, by dtype
        quantized_rows        activations as int16 or int8, by stretches of a row
        int16_tiles           matmuls of int8 matrices with few rows, as int16
        int8_tiles            matmuls of int8 matrices with many rows, as int8
        matmul                the matmul of tokens with a packed matrix
        matmul_plan           which instructions multiply with a packed matrix, and whether it pays
    attention/                attention straight on the pages of the KV cache
        attention_arguments   what attention is given: pages, spans of rows, its shape
        attention_task        what is told of pages and rows, and where scratch lies
        paged_attention       attention straight on the pages of the KV cache
    lora/                     LoRA adapters on a step's tokens
        adapter_arguments     which low-rank adapters a step's tokens have, and where they add
        adapter_intrinsics    sums of A x and columns of B, in registers
        adapters              low-rank adapters on a step's tokens
        adapter_plan          which tokens adapters are computed for together, once a step
    reference                 every operation in torch: the specification
    token_masks               which tokens may come, written into logits
    compiled_bodies           which bodies a model needs on the CPU
    cpu                       the override for CPUs: what pays, compiled
cuda/                         every CUDA kernel with its launcher, and an emulator that runs them
    cache_folder              where what was compiled is kept (no torch)
    emulator/                 kernels on a CPU, run thread by thread, checked (no torch)
        reports               what a kernel did wrong, with the line of its source (no torch)
        toolchain             g++, NVIDIA's headers, and built libraries that are kept (no torch)
        source                from CUDA C++ to what g++ compiles (no torch)
        arrays                arrays between pages that cannot be read (no torch)
        library               a built library, and how a kernel of it is run (no torch)
        arguments             an argument checked against its parameter (no torch)
        module                CUDA C++ as kernels that run on the CPU (no torch)
    features                  parts that can be switched off (no torch)
    device/                   what every launch needs: device, compiler, streams, graphs
        device                CuPy, once a host asks for a CUDA device
        compiler              CUDA C++ to machine code, with what its kernels use (no torch)
        thread_contexts       the device's context in each thread that calls the driver (no torch)
        dependent_launch      launches that begin while the kernel before them ends (no torch)
        launch                where kernels run: a GPU, or the emulator
        streams               where work is enqueued: a CUDA stream, or the emulator
        uploads               arrays of a step, to the device in one copy
        downloads             tensors of a device on their way to the CPU
        graphs                generation steps, recorded and run again
    attention/                attention over the pages of the KV cache, and what writes them
        paged_kernels         what the kernels over pages take: heads, dtypes
        cache_write           rotation, QK norm, and keys and values to their pages
        block_copy            beginnings of blocks, copied
        generation_plan       how the work of generation attention is cut (no torch)
        float_attention       attention of both phases in float32
        generation_attention  attention of rows with one token, by a plan
        warpgroup_attention   the same of several tokens, in products of warpgroups
        context_attention     attention of rows with several tokens
    norms                     residual add, RMSNorm, LayerNorm
    gemm/                     matmuls of few rows, of some more, and of LoRA
        gemv                  products of few rows with a matrix
        gemm                  products of some more rows, and how blocks share them
        own_matmuls           a product by the kernel for its number of rows
        lora                  low-rank adapters on a step's tokens
        matmul_choice         which of them are ours, and which torch's, by a measurement
    activations               SiLU times up, GELU
    sampling/                 from logits to tokens and their log probabilities
        token_masks           bits for tokens that may come, on rows of logits
        adjustments           bias, penalties and bans on rows of logits
        sampling              one token from each row of logits
        log_probs             log probabilities of given tokens
        beam_step             the best continuations of beams
    kernels                   the override for CUDA: which kernel serves which op
    matrix                    every kernel in every instantiation, compiled
ranks/                        one process per rank: its part of the model, and their messages
    layout                    which part of the model a rank has (no torch)
    frames                    messages on a socket (no torch)
    watch                     which rank has failed (no torch)
    meeting                   how ranks find each other (no torch)
    links                     what the managers of all ranks tell each other (no torch)
    small_tensors             tensors of a few kilobytes, each sent to each
    collectives               what the networks of several ranks do together
    world                     which rank this is, and where the others are
memory/                       tensors that outlive a step, and the files that weights come from
    checkpoint_files          files of a checkpoint, which somebody else wrote (no torch)
    host_memory               memory of the host that a device copies from and to
    kv_pool                   the tensors that blocks stand for
    device_kv_pool            the same on a device, whose blocks a kernel copies
    adapter_pool              the tensors that pages of adapters stand for
    tensor_sources            where tensors of a checkpoint come from
    weights                   tensors loaded by name into storage the executor owns
models/                       the network: packed inputs, decoder families as a table
    batch                     a schedule as packed tensors
    fields                    a checkpoint's config, read with checks
    rope                      rotary positions
    spec                      which network a checkpoint holds, and its parameters
    splits                    which part of which parameter a rank has, as a table
    lora_modules              the parts of a layer that LoRA adapters may change, by their ids
    families                  what differs between families, as a table
    read_spec                 from a config.json to a spec
    checkpoint_model          the network
    model                     what an executor runs, and how a checkpoint becomes that
decoding/                     from logits to tokens, and to the end of an output
    deferred                  a value that is worked out only if it is written (no torch)
    stop_words                the first of several words in a growing text
    end_rule                  where an output ends, for a text and for each beam
    drafting                  tokens drafted ahead
    lines                     which line of a table belongs to which beam
    processors/               logits post-processors: which rows they get, and how they are called
        rows                  what a step gives to logits post-processors
        stream_watch          who works on another stream than the model's
        logits                who is called for which rows, and what becomes of one that fails
        kernel_signature      what a kernel over rows is passed
        raw_kernel            a logits post-processor given as CUDA source
    guided/                   JSON schemas and grammars as masks of tokens
        schema_numbers        numbers of a JSON schema as the parser can hold them (no torch)
        schema_references     where the references of a JSON schema point to (no torch)
        schema_overlap        whether two JSON schemas exclude each other (no torch)
        schema_complement     what does not fit a JSON schema, as schemas (no torch)
        schema_reader         a JSON schema as the parser can enforce it (no torch)
        grammar_matcher       a grammar compiled, here or in a process of its own (no torch)
        grammar_trial         a grammar compiled in a process that may be ended (no torch)
        grammar_masks         which tokens a grammar permits, as masks of logits
        guided                grammars for a tokenizer, compiled in the background
    sampling/                 from a row of logits to a token, seeded by position
        random_numbers        functions of seed and position
        adjustments           bias, penalties, bans: what changes a row first
        choice                the best token of a row, or a drawn one
        best_tokens           the best tokens of rows of scores
        sampling              one token from each row
        device_sampling       rows that a device can choose alone
        rejection             a draft that was sampled, accepted or replaced
    search/                   beam search
        beam_search           beams and their parents, searched, or each a text of its own
        beam_state            beams as data, and back
executor/                     one step on a device: input arrays, the network, the choice of tokens
    packed_rows               a batch as the CPU knows it, padded or cut (no torch)
    sequence_tables           tokens and blocks of each sequence, here and on a device
    step_in_flight            a step under way: what belongs to which row
    choice/                   from the logits of a step to its tokens and their log probabilities
        prompt_scores         how likely the tokens of prompts were
        gathered_logits       what an executor keeps of its logits, by slot
        drawn_drafts          drafts that a host has drawn, accepted or replaced
        top_tokens            the best tokens of choices, for rows that want them
        token_chooser         from the logits of a step to its tokens
        device_chooser        the same choice, enqueued on a device
    runner                    packed rows to logits, on the CPU
    device_runner             the same, enqueued on a device
    result_message            what a step yielded, as a message to other ranks
    forward_thread            forwards that run beside the loop
    out_of_memory             a batch that does not fit, in parts
    torch_executor            one step, in torch
    staged_executor           a stage of a pipeline, whose forwards run beside the loop
    rank_executor             the executor of a rank: who chooses, and how the others hear of it
loop/                         `iterate()`, and the requests that it iterates over
    request_times             when what happened to a request (no torch)
    active_request            a request from its admission to its final response
    limits                    what one request may be, and whether its lengths fit (no torch)
    admission                 whether a request can be taken at all
    allocation                a decision with its blocks, frozen as a Schedule
    decision                  who runs next: a scheduler is asked, and its answer checked
    active_state              an active request as data, and back
    adapters                  who waits for an adapter, and whose adapters are on the device
    adapter_state             the same as data and back, and a copy to try things
    extras                    log probabilities and logits, until they are sent
    responses                 tokens as a host gets them
    request_table             the active requests: who comes in, and who ends
    confirmation              what the result of a step does to its requests
    token_loop                iterate(), in about 25 lines
    next_decision             what its next iteration would decide, tried on copies
assembly/                     builds all parts of a loop from options and a checkpoint
    options                   which configurations a manager takes (no torch)
    sizing                    how large the KV cache is, and how long a sequence may be
    adapter_sizing            how large the cache of adapters is
    blueprint                 what a loop is built of, but for its model; and the loop of it
    backend                   where a model and its KV cache lie, and what runs them there
    ranks                     what the managers of all ranks agree on before they run
    assemble                  from checked options and a model to a loop
recorder/                     writes down the inputs and decisions of a loop; the black box
    requests                  requests of a recording, as JSON and back
    values                    values of a recording, as JSON and back
    limits                    what the numbers of a recording may be
    difference                where two schedules differ, for people
    recording                 a recording as frozen values, and its file
    sizes                     how many bytes what a black box keeps takes
    kept                      what a black box keeps of what passes
    black_box                 the last of them, in memory
    black_box_file            the file of a black box, for its owner alone (no torch)
    taps                      a host and an executor that pass everything on
    recorder                  what passes between a loop and its world, written down
host/                         the host's four callbacks, called safely
    turns                     what a loop does next, and its host as a worker sees it
    timers                    how long each call of the host's code takes
    receiver                  what Get has returned, read once, on its way to the next intake
    retries                   how long Get is left alone after it has failed
    preparation               logits post-processors on their way to being ready
    background_jobs           long work in pieces, beside the steps of a loop or between them
    adapter_loader            adapters read, written and copied, on threads
    broadcast                 a callback whose answers all ranks get
    callback_host             the four callbacks, called safely
    packed_requests           requests as bytes
    rank_messages             an intake of rank 0 as a message to the other ranks
    rank_answers              what one rank's host has answered, to be compared with another's
    ranked_host               the callbacks of a host whose model has several ranks
manager/                      a thread around the loop: `GptManager`
    inbox                     what other threads want of the loop
    inspection                who owns which block, and why a request waits
    watching                  what a loop does, told while it runs
    recovery                  what becomes of a manager whose iteration raised
    stall_watch               when steps ended, and who waits although none does
    ending                    what has to happen when a loop ends, or hangs
    worker                    what a manager's thread does
    gpt_manager               GptManager: a thread, and a life around the loop
gptmanager                    the public names, as hosts import them
callbacks/                    ready-made callbacks that any host could have written
    text/                     from the tokens of a model to text, and back
        checkpoint            what a checkpoint says besides weights: end tokens, tokenizer
        text_stream           tokens as text, while they come
        template_program      a chat template filled in, here or in a process of its own (no torch)
        templates             where chat templates are, and how one is filled in within bounds
        control_tokens        texts of clients in a chat that never become control tokens (no torch)
        chat_template         messages of a chat as the tokens of a prompt
    queue/                    queues between a host and its manager
        wakeups               asyncio waiters, woken from another thread
        result                what the responses to one request amount to
        generation            the handle on a request: a future, and a stream of tokens
        pending_requests      requests that wait to be fetched, in the order they will be
        attachment            what a queue needs of its manager beside the callbacks
        request_queue         three of the four callbacks as a queue with futures
        async_request_queue   the same for asyncio, where a full queue is awaited
    sinks/                    where statistics go: log records, lines of JSON, Prometheus
        observers             several callbacks as one
        json_lines            statistics, a line each
        logging               statistics, as log records
        metric_names          which metrics there are, and what others call them (no torch)
        metric_counts         what they count
        prometheus            a manager's metrics, for Prometheus (no torch)
    ranks/                    rank 0's callbacks, answered on every rank
        mpi_transport         rank 0's answers on every rank, by MPI
        broadcast             what rank 0's callbacks answer, on every rank
    live/                     the live page: a manager's schedule in a browser
        tap                   what the loop's thread does for a live page
        rows                  what a watched loop does, as rows of spans
        feed                  follows a manager while somebody looks, and tells it as events
        page                  a page that shows a manager's schedule while it runs
    processors/               ready-made logits post-processors
        token_rules           tokens that may come, or may not, or rather
        temperature_schedule  a temperature that changes
        watermark             a watermark in sampled text
        forced_prefix         an output that begins with given tokens
        token_bytes           the bytes that each token adds to a text (no torch)
        banned_texts          words that a text never contains, in whatever tokens
        guided_decoding       grammars for a checkpoint's tokenizer
    name_pattern              regular expressions of configs, in bounded steps (no torch)
    adapters/                 adapters that PEFT saved
        peft_config           what PEFT says of an adapter that it saved
        peft_adapter          such an adapter, as tensors of a request
    start                     generate(): the three-line start
bindings/                     hosts of tensorrt_llm.bindings, by one changed import
    tensor_names              names of tensors, as constants (no torch)
    executor                  names of its module of this name
    requests                  requests and named tensors, as they are there
    optional_params           options as they are there, and what they are here
    memory_counters           bytes of the managers that run (no torch)
    gpt_manager               GptManager, with both orders of its arguments
testing/                      what hosts and researchers test with
    scripted_executor         steps without a network, which believe nothing
    hosts                     scripted models, recording callbacks
    contract                  does a host keep the contract with a manager, and it with the host?
    scenarios                 what a scheduler is tried on, by a seed
    rules                     the rules of a scheduler, and which of them an answer breaks
    scenario_run              one scenario, run through the real loop
    conformance               does a scheduler keep the rules?
replay/                       runs a recorded run again, and finds the first difference
    replaying                 a recorded run, once more, and where it goes another way
    main                      replay, once its arguments are read
    command                   what replay accepts (no torch)
simulator/                    the real loop under a virtual clock, without a model
    load                      which requests arrive when, and how long they are
    known_outputs             what each step yields, of outputs that a load knows
    cost_model                how long a step takes
    figures                   what a simulated run came to
    stages                    who of a pipeline works on which step when
    simulation                a schedule without a model
    comparison                the manager that is simulated
    report                    what simulate tells, for people and as JSON
    main                      simulate, once its arguments are read
    command                   what simulate accepts (no torch)
picture/                      a schedule, drawn: SVG, a page to zoom into, a Perfetto trace
    trace                     what became of each request in each iteration (no torch)
    waiting                   why the first that waits does (no torch)
    builder                   from schedules, arrivals and ends to a trace
    observer                  a loop, followed while it runs
    recorded                  a recorded run, followed
    svg                       shapes, and the look that all pictures share
    layout                    where things stand in a picture, and how close one looks
    rows                      a row for each request
    load                      batch, tokens and memory below
    drawing                   a schedule, seen
    stages                    who of a pipeline works on which micro batch when
    zoom_page                 the picture as a page to zoom into
    perfetto                  the same for Perfetto
    main                      picture, once its arguments are read
    command                   what picture accepts (no torch)
run/                          a file of requests, run by a manager
    text_encoder              texts as token ids, and which are too long for any request
    adapter_folders           adapters that lines name by their folders
    line_fields               the fields that a line of requests may have
    requests_file             requests as JSON lines
    results_file              results as JSON lines
    latencies                 how long clients waited
    follow                    another rank's part in a command
    live_view                 what a person sees while requests run
    watch                     a run, followed on the terminal's thread
    main                      run, once its arguments are read
    command                   what run accepts (no torch)
server/                       a manager behind HTTP and gRPC
    extras                    modules that need an extra (no torch)
    errors                    a refusal as every client gets it
    http/                     bodies, keys, responses and connections of HTTP
        access                who may reach a server, and with how much, checked
        warning_header        what a client should know about its answer (no torch)
        responses             JSON, errors as one object, server-sent events (no torch)
        hosts                 which names the server answers to (no torch)
        keys                  who may use the server (no torch)
        json_text             JSON, and what it would take in memory (no torch)
        body                  bodies of requests, within their limits (no torch)
        connections           how many connections there may be, and of whom (no torch)
        http_protocol         HTTP's bytes, within bounds (no torch)
    settings                  what a server is told, checked
    fields                    fields of JSON bodies, read and described (no torch)
    request_fields            the fields of a request, and which were ignored (no torch)
    context_length            whether prompt and output fit into the model's context
    engine/                   what every protocol runs on: manager, calls, adapters, metrics
        model_card            what a server knows of its model beside the weights
        adapters              the adapters that clients may name
        metrics               what the manager and the server count (no torch)
        call                  the requests of one call, and how they end with it
        engine                what every front runs requests on
    health                    whether the server lives, and takes requests
    live                      the live page of the server (no torch)
    text/                     answers as text, shared by the protocols
        tools                 tools that a model may call, and what calls look like
        structured            answers that fit a schema, a pattern, a choice, a grammar
        generation_fields     how to generate, and what to tell of it
        stop_strings          texts that end an output (no torch)
        log_probs             log probabilities in the shapes that clients know
        outputs               one text from its tokens, and where it ends
        sampling              from fields to what the engine is asked for
        processors            what an output has to fit, or must not contain
        answer                all outputs of a request, while they are generated
    chat/                     from messages to a prompt, and from an answer to a message
        messages              messages of a chat, as templates want them
        functions             the deprecated functions, as tools
        tool_parsing          calls of tools in the text of a model (no torch)
        chat_answer           the text of an answer as a chat's message, and as deltas
        chat_prompt           from messages to the tokens of a prompt
    openai/                   what OpenAI's clients know
        models                the model and its adapters
        completions           prompts as they are, and what follows them
        chat                  /v1/chat/completions
        tokenization          texts as tokens and back
    triton/                   what clients of the C++ backend know
        errors                refusals in Triton's protocol
        messages              a call and its answers, whatever has carried them (no torch)
        datatypes             tensors as bytes and as numbers (no torch)
        tensors               what a model takes and gives, and a call's inputs, checked (no torch)
        statistics            counts of calls, and their times (no torch)
        token_model           token ids in, token ids out
        text_model            text in, text out
        inference             calls, from their tensors to their responses
        repository            metadata and configurations
        described             paths below /v2 in the OpenAPI document
        http_messages         bodies of HTTP's infer call (no torch)
        http                  /v2/..., with the generate extension
        wire                  bytes of a message, before it is parsed (no torch)
        grpc_messages         messages of the generated service
        grpc_service          the service, and its server
    openapi                   the OpenAPI document
    app                       all endpoints as one application
    serving                   a server from its settings to its end
    main                      serve, once its arguments are read
    command                   what serve accepts (no torch)
bench/                        measures speed, its own and that of other libraries
    names                     names that arguments of benchmarks may have (no torch)
    timing                    how long one call takes, and how much time is left
    roofline                  what a device can do at best, and the floors of a model
    machine                   what a figure was measured on
    load                      requests of random tokens, and models of random weights
    adapter_load              random adapters of a model, and which requests have which
    engine                    a load through a manager, with the clock outside
    peers/                    other libraries on the same load
        transformers_peer     the same load through transformers
        vllm_cpu_script       the same load through vLLM, in the interpreter that has it (no torch)
        vllm_peer             that script as a process
    throughput                a load on this machine, beside the peer
    kernels/                  the kernel benchmark: cases by part, next to their peers
        cases                 what is known of a case: least work, contenders, what is right
        paged_rows            sequences over pages, for attention cases
        attention_peers       others' attention on the same pages
        attention_cases       attention over pages
        matmul_cases          matmuls of few rows
        adapter_cases         low-rank adapters
        token_cases           kernels that take tokens or blocks
        sampling_cases        sampling
        logits_cases          what stands around sampling
        kernel_runs           cases run beside their peers, right before fast
        benchmark             the kernel benchmark
    end_to_end/               the end-to-end benchmark on a device, part by part
        dense_reference       a Llama without a cache, whose logits are right
        device_trace          how busy a GPU is
        serving_parts         steps and loads of a manager, policies on a KV cache that is too small
        workbench             device, model and manager of the end-to-end benchmark
        benchmark             the end-to-end benchmark, part by part
    table                     reports as tables
    main                      bench, bench kernels and bench e2e, once their arguments are read
    command                   what those accept (no torch)
cli                           the command line (no torch)
__main__
"""

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("gptmanager", "callbacks", "cuda")
MAIN = ("gptmanager", "__main__")  # modules for everybody, in no package
Statement = ast.Import | ast.ImportFrom | ast.Constant
LATER = re.compile(r"gptmanager(\.\w+)+(:\w+)?")  # MODULE:NAME, or a module where one is loaded:
LOADERS = {"lazy_names", "load_extra"}
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
    assert len(inside - data) <= 32


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
    names = [path.stem for path in files]
    assert sum(path.parent == ROOT / "tests" for path in files) <= 25
    for path in files:
        for statement, _ in imports(ast.parse(path.read_text("utf-8"))):
            for target in targets(statement, "", {}):
                test = target.partition(".")[0]
                assert not (test.startswith("test_") and test in names), f"{path} imports {test}"


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
