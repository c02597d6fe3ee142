#!/usr/bin/env python3
"""A long-context GPT trained twice on the same batches: with its head in PyTorch, and with it in lmhead's service.

    python3 client/python/bench/long_context.py --server build/bin/lmhead --out results --contexts 32768,65536 --steps 15

(the package lmhead is installed, or PYTHONPATH=client/python and LMHEAD_LIBRARY=build/bin/liblmhead.so are set.)

Writes result.json with every step's loss and time, the peak memory of the trainer and of the service, and what was found;
beside it losses.png and memory.png, where matplotlib is installed (elsewhere: --plot result.json). The exit code is 0 when the
loss curves agree and the trainer's peak fell by at least the float32 logits. A trainer that runs out of memory with its head
local is recorded, not an error, as long as another context has both.

Each trainer is a process of its own, and the service runs beside the remote one only, on the same device. The text is in a
byte-pair vocabulary learnt at start; the head has --vocab_size rows, of which the text uses the first few thousand.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import hashlib
import json
import multiprocessing
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F

import lmhead
from byte_pairs import byte_pairs
from gpt import Trunk

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))
from common import LICENCES, read_text  # noqa: E402

SEED = 1
BETAS, WEIGHT_DECAY, MAX_GRAD_NORM, WARMUP_STEPS = (0.9, 0.95), 0.1, 1.0, 4
UNTIMED_STEPS = 2  # In which kernels are loaded and memory is first taken.
# Largest difference of a step's losses, of the local one. Two runs that round differently drift apart as they train.
LOSS_BOUNDS = {"float32": 1e-4, "bfloat16": 1e-3}

# Becomes the program of its arguments, which the kernel kills (prctl's PR_SET_PDEATHSIG) when the thread that started it ends.
END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--server", type=pathlib.Path, help="the executable lmhead")
    parser.add_argument("--out", type=pathlib.Path, help="folder for result.json and the pictures")
    parser.add_argument("--plot", type=pathlib.Path, help="only draw the pictures of this result.json, beside it")
    parser.add_argument("--contexts", default="32768,65536", help="tokens of a step's one sequence, each a pair of runs")
    parser.add_argument("--steps", type=int, default=15, help="optimizer steps")
    parser.add_argument("--text", type=pathlib.Path, nargs="+", default=[LICENCES, HERE.parents[2] / "docs"],
                        help="files or folders")
    parser.add_argument("--byte_pairs", type=int, default=2048, help="most tokens to learn from the text")
    parser.add_argument("--vocab_size", type=int, default=131072, help="rows of the head")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--learning_rate", type=float, default=6e-4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=tuple(LOSS_BOUNDS), help="of products; default: bfloat16 on cuda, else float32")
    options = parser.parse_args()
    if options.plot is None and (options.server is None or options.out is None):
        parser.error("want --server and --out, or --plot")
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    return options


# --- A trainer, in a process of its own -------------------------------------------------------------------------------


class LocalHead:
    """Dense logits and cross entropy in PyTorch."""

    def __init__(self, weight, options):
        self.weight = torch.nn.Parameter(weight.to(options.device))
        self.optimizer = torch.optim.AdamW([self.weight], betas=BETAS, weight_decay=WEIGHT_DECAY)

    def step(self, _number, forward, labels, trunk, learning_rate):
        """Forward and backward passes, clipping, the head's update: the loss and the norm before clipping."""
        self.optimizer.zero_grad()
        logits = F.linear(forward(), self.weight)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        del logits
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*trunk.parameters(), self.weight], MAX_GRAD_NORM)
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()
        return float(loss.detach()), float(norm)


class ServiceHead:
    """The same in the service."""

    def __init__(self, weight, options, address):
        self.dtype = getattr(torch, options.dtype)
        self.head = lmhead.RemoteHead.create(
            address, "lm", vocab_size=weight.shape[0], hidden_size=weight.shape[1], weight_dtype=self.dtype,
            optimizer=lmhead.AdamW(betas=BETAS, weight_decay=WEIGHT_DECAY))
        self.head.load_weight(weight)

    def step(self, number, forward, labels, trunk, learning_rate):
        """As LocalHead.step."""
        with self.head.step(number) as step:
            loss = step.loss(forward().to(self.dtype), labels, reduction="mean")
            loss.backward()
            clipped = lmhead.clip_grad_norm(trunk.parameters(), step.prepare(), MAX_GRAD_NORM)
            step.commit(learning_rate, clipped.grad_multiplier)
        return float(loss.detach()), clipped.grad_norm


def batches(ids, context, device):
    """Endless random pieces of the text: inputs and labels, [1, context] each."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        start = int(torch.randint(0, len(ids) - context, (1,), generator=generator))
        piece = ids[None, start:start + context + 1].to(device)
        yield piece[:, :-1], piece[:, 1:]


def peak_bytes(device):
    """Most memory of this trainer: torch.cuda.max_memory_allocated, on the CPU its largest resident set."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(options, ids, context, address):
    """Trains for options.steps with the head at `address`, None: local; what was measured."""
    device = options.device
    torch.manual_seed(SEED)
    trunk = Trunk(max(ids) + 1, options.width, options.layers, options.heads).to(device)
    weight = torch.empty(options.vocab_size, options.width).normal_(std=0.02)
    head = LocalHead(weight, options) if address is None else ServiceHead(weight, options, address)
    del weight
    optimizer = torch.optim.AdamW(trunk.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY)
    autocast = torch.autocast(device, torch.bfloat16, enabled=options.dtype == "bfloat16")
    losses, norms, seconds = [], [], []
    data = batches(torch.tensor(ids), context, device)
    try:
        for number in range(1, options.steps + 1):
            inputs, labels = next(data)
            start = time.monotonic()
            learning_rate = options.learning_rate * min(1.0, number / WARMUP_STEPS)
            optimizer.zero_grad()
            with autocast:
                loss, norm = head.step(number, lambda: trunk(inputs), labels, trunk, learning_rate)
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.monotonic() - start)
            losses.append(loss)
            norms.append(norm)
    except torch.cuda.OutOfMemoryError as error:
        if address is not None:
            raise
        return {"out_of_memory": str(error), "losses": losses}
    return {"losses": losses, "grad_norms": norms, "step_seconds": seconds, "peak_bytes": peak_bytes(device),
            "median_step_seconds": statistics.median(seconds[UNTIMED_STEPS:] or seconds),
            "trunk_parameters": sum(p.numel() for p in trunk.parameters())}


def in_a_process(*call):
    """The result of the call in a fresh process, whose memory is gone afterwards."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(*call).result()


# --- The service ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def service(options):
    """A fresh `lmhead serve` on a Unix socket: its address."""
    with tempfile.TemporaryDirectory(prefix="lmhead") as name:
        folder = pathlib.Path(name)
        ready, log = folder / "ready", options.out / "service.log"
        with open(log, "wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-c", END_WITH_PARENT, str(os.getpid()), options.server, "serve",
                 f"--listen=unix:{folder}/socket", "--metrics_listen=127.0.0.1:0",
                 f"--ready_file={ready}", f"--backend={options.device}"], stdout=stream, stderr=stream)
        try:
            deadline = time.monotonic() + 60
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the service does not start:\n{log.read_text(errors='replace')}")
                time.sleep(0.05)
            yield f"unix:{folder}/socket"
        finally:
            process.terminate()
            process.wait()


def run_remote(options, ids, context):
    """The remote trainer's measurements, with the service's own."""
    with service(options) as address:
        found = in_a_process(train, options, ids, context, address)
        with lmhead.Client(address) as client:
            info = client.server_info()
    found["service"] = {
        "peak_bytes": sum(int(rank["peak_process_bytes"]) for rank in info["memory"]),
        "device_peak_bytes": sum(int(rank["device_peak_bytes"]) for rank in info["memory"]),
        "version": info["version"], "backend": info["backend"]}
    return found


# --- What was found ---------------------------------------------------------------------------------------------------


def gib(number):
    return f"{number / 2**30:.2f} GiB"


def judge_pair(run, dtype):
    """(holds, sentence) for each claim about one context, whose local run was not out of memory."""
    local, remote = run["local"], run["remote"]
    gaps = [abs(b - a) / abs(a) for a, b in zip(local["losses"], remote["losses"])]
    worst, bound = max(gaps), LOSS_BOUNDS[dtype]
    yield worst <= bound, (f"context {run['context']}: losses differ by at most {worst:.2e} of the local one over "
                           f"{len(gaps)} steps, bound {bound:.0e}; last {local['losses'][-1]:.4f} local, "
                           f"{remote['losses'][-1]:.4f} remote")
    fell, wanted = local["peak_bytes"] - remote["peak_bytes"], run["logits_bytes"]
    yield fell >= wanted, (f"context {run['context']}: the trainer's peak fell by {gib(fell)}, from "
                           f"{gib(local['peak_bytes'])} to {gib(remote['peak_bytes'])}; float32 logits are {gib(wanted)}")


def judge(result):
    """(holds, sentence) for each claim."""
    verdicts, num_pairs = [], 0
    for run in result["runs"]:
        if "out_of_memory" in run["local"]:
            verdicts.append((True, f"context {run['context']}: does not fit with its head local"))
        else:
            num_pairs += 1
            verdicts += judge_pair(run, result["dtype"])
    if num_pairs == 0:
        verdicts.append((False, "no context fits with its head local, so that there is nothing to compare: take shorter ones"))
    return verdicts


def device_facts(device):
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return {"name": properties.name, "total_memory_bytes": properties.total_memory,
                "peak_is": "torch.cuda.max_memory_allocated"}
    return {"name": "cpu", "total_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "peak_is": "largest resident set"}


def measure(options):
    """Runs everything, writes result.json after each context: the result."""
    options.out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(dict.fromkeys(read_text(path) for path in options.text))
    ids, tokens = byte_pairs(text, options.byte_pairs)
    contexts = [int(context) for context in options.contexts.split(",")]
    if len(ids) <= max(contexts):
        raise SystemExit(f"the text has {len(ids)} tokens, want more than {max(contexts)}: name more with --text, or lower "
                         "--byte_pairs")
    if len(tokens) > options.vocab_size:
        raise SystemExit(f"--byte_pairs={options.byte_pairs} exceeds --vocab_size={options.vocab_size}")
    result = {
        "date": datetime.date.today().isoformat(), "device": device_facts(options.device), "torch": torch.__version__,
        "dtype": options.dtype, "steps": options.steps,
        "text": {"paths": [str(path) for path in options.text], "bytes": len(text.encode()), "tokens": len(ids),
                 "sha256": hashlib.sha256(text.encode()).hexdigest()},
        "model": {"width": options.width, "layers": options.layers, "heads": options.heads,
                  "vocab_size": options.vocab_size, "vocab_rows_in_use": len(tokens)},
        "optimizer": {"kind": "AdamW", "betas": BETAS, "weight_decay": WEIGHT_DECAY, "max_grad_norm": MAX_GRAD_NORM,
                      "learning_rate": options.learning_rate, "warmup_steps": WARMUP_STEPS},
        "runs": []}
    start = time.monotonic()
    for context in contexts:
        run = {"context": context, "logits_bytes": 4 * context * options.vocab_size}
        result["runs"].append(run)
        run["local"] = in_a_process(train, options, ids.tolist(), context, None)
        tell(context, "local", run["local"])
        run["remote"] = run_remote(options, ids.tolist(), context)
        tell(context, "remote", run["remote"])
        result["wall_seconds"] = time.monotonic() - start
        result["verdicts"] = [{"holds": holds, "what": what} for holds, what in judge(result)]
        (options.out / "result.json").write_text(json.dumps(result, indent=1))
    return result


def tell(context, where, found):
    """A line of progress."""
    if "out_of_memory" in found:
        print(f"context {context}, head {where}: out of memory", flush=True)
        return
    also = f", service's peak {gib(found['service']['peak_bytes'])}" if "service" in found else ""
    print(f"context {context}, head {where}: loss {found['losses'][0]:.4f} to {found['losses'][-1]:.4f}, "
          f"{found['median_step_seconds']:.3f} s a step, trainer's peak {gib(found['peak_bytes'])}{also}", flush=True)


# --- Pictures ---------------------------------------------------------------------------------------------------------


def plot_losses(result, path, pyplot):
    figure, rows = pyplot.subplots(2, len(result["runs"]), squeeze=False, sharex=True, height_ratios=(3, 1),
                                   figsize=(6 * len(result["runs"]), 5))
    for run, curve, gap in zip(result["runs"], *rows):
        local, remote = run["local"]["losses"], run["remote"]["losses"]
        curve.plot(range(1, len(local) + 1), local, color="tab:orange", linewidth=5, alpha=0.5, label="head local")
        curve.plot(range(1, len(remote) + 1), remote, color="tab:blue", marker=".", label="head in the service")
        curve.set_title(f"context {run['context']}")
        curve.set_ylabel("loss, nats a token")
        curve.legend()
        both = range(1, min(len(local), len(remote)) + 1)
        gap.plot(both, [remote[i - 1] - local[i - 1] for i in both], color="tab:gray")
        gap.set_ylabel("difference")
        gap.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def plot_memory(result, path, pyplot):
    figure, axes = pyplot.subplots(figsize=(4 + 3 * len(result["runs"]), 4.5))
    names = ("trainer, head local", "trainer, head in the service", "service", "logits alone, float32")
    total = result["device"]["total_memory_bytes"]
    for i, (name, color) in enumerate(zip(names, ("tab:orange", "tab:blue", "tab:green", "lightgray"))):
        for j, run in enumerate(result["runs"]):
            fits = "out_of_memory" not in run["local"]
            heights = (run["local"]["peak_bytes"] if fits else total, run["remote"]["peak_bytes"],
                       run["remote"]["service"]["peak_bytes"], run["logits_bytes"])
            full = i == 0 and not fits
            bar = axes.bar(j + 0.2 * i, heights[i] / 2**30, 0.18, color=color, label=name if j == 0 else None,
                           hatch="//" if full else None)
            axes.bar_label(bar, ["out of memory" if full else f"{heights[i] / 2**30:.1f}"], fontsize=8)
    axes.set_xticks([j + 0.3 for j in range(len(result["runs"]))], [f"context {run['context']}" for run in result["runs"]])
    axes.set_ylabel(f"peak memory, GiB ({result['device']['name']})")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def plot(result, folder):
    """losses.png and memory.png, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print(f"no matplotlib here: draw elsewhere with --plot {folder / 'result.json'}")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot
    plot_losses(result, folder / "losses.png", pyplot)
    plot_memory(result, folder / "memory.png", pyplot)
    print(f"wrote {folder / 'losses.png'} and {folder / 'memory.png'}")


def main():
    options = arguments()
    if options.plot is not None:
        plot(json.loads(options.plot.read_text()), options.plot.parent)
        return 0
    result = measure(options)
    plot(result, options.out)
    for verdict in result["verdicts"]:
        print(f"{'holds' if verdict['holds'] else 'FAILS'}: {verdict['what']}")
    return 0 if all(verdict["holds"] for verdict in result["verdicts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
