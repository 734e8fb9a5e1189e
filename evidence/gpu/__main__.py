"""What only a GPU can tell: a queue of jobs of at most nine minutes that resume; see docs/contribute/gpu.md."""

import argparse
import ctypes
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

from evidence.gpu.jobs import JOBS, QUEUE, ROWS, Job

LIMIT = 520.0  # seconds of a job: a machine may be lent in commands of ten minutes, and files have to come back
FAILED, MISSING, STOPPED = 1, 2, 3
NEEDED = ("torch", "triton", "timm", "lightning", "torchvision", "torchmetrics", "PIL", "yaml", "pytest")
PREPARED = ("small", "softmax", "sweep", "sweep_back")  # whose generated code is our kernels alone


def main() -> int:
    options = arguments()
    jobs = [JOBS[name] for name in options.jobs]
    if options.work:
        set_up()
        return max(work(job, options) for job in jobs)
    if options.list:
        for job in QUEUE:
            print(f"{job.name:11} {job.minutes} min  {state(job, options.rows)[0]:15}  {job.decides}")
    elif options.prepare:
        from evidence.gpu import carry

        cases = [case for name in PREPARED for case in JOBS[name].cases(False)]
        print(carry.prepare([case.generate for case in cases if case.generate]))
    elif options.tables:
        from evidence.gpu import rows

        rows.write_tables(JOBS, options.rows)
    elif options.dry:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        import torch

        torch.compile = partial(torch.compile, backend="eager")  # with inductor toys would take minutes
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            options.rows = Path(folder) if options.rows == ROWS else options.rows
            return max(work(job, options) for job in jobs or QUEUE)
    elif lacking := missing():
        print(f"evidence.gpu: this machine lacks {', '.join(lacking)}: install that first.", file=sys.stderr)
        return MISSING
    elif jobs := jobs or [job for job in QUEUE if not state(job, options.rows)[1]][:1]:
        return max(supervise(job, options) for job in jobs)
    else:
        print("Every job has all its rows on one card; name jobs to run them on another.")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m evidence.gpu", description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"{', '.join(JOBS)} (default: the first unfinished)")
    for flag, text in (
        ("--list", "what each job decides, minutes, state"),
        ("--dry", "run jobs, or all, on the CPU at toy sizes; keep no rows"),
        ("--prepare", "compile into build/gpu what a GPU machine takes along"),
        ("--tables", "write the tables of the page from the rows"),
        ("--work", argparse.SUPPRESS),  # in the process that a job runs in
    ):
        parser.add_argument(flag, action="store_true", help=text)
    parser.add_argument("--first", type=int, metavar="N", help="with --dry, only the first N cases of every job")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="copy rows and caches there after every job")
    parser.add_argument("--rows", type=Path, metavar="FOLDER", default=ROWS, help="where the rows are")
    options = parser.parse_args()
    if unknown := [name for name in options.jobs if name not in JOBS]:
        parser.error(f"there is no job {', '.join(unknown)}, expected {', '.join(JOBS)}")
    return options


def missing() -> list[str]:
    """What this machine lacks for the jobs."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        lacking.append("a C compiler, with which Triton starts kernels")
    if not lacking:
        import torch

        lacking += [] if torch.cuda.is_available() else ["a GPU that torch sees"]
    return lacking


def state(job: Job, folder: Path) -> tuple[str, bool]:
    """The state of a job in words, and whether it is finished: every case has a row on one card."""
    from evidence.gpu import rows

    cases = {case.name: rows.code_digest(case.code, exact=False) for case in job.cases(False)}
    noted = rows.read(folder, job.name)
    card, count = rows.most_complete(cases, noted)
    where = f" on {card}" if count else ", and rows of older code" if noted else ""
    finished = count == len(cases)
    return f"{'finished: ' * finished}{count} of {len(cases)} rows{where}", finished


def supervise(job: Job, options: argparse.Namespace) -> int:
    """Runs a job in a process of its own, and ends it with all its children when its time is over."""
    from evidence.designs import DESIGNS
    from evidence.gpu import carry

    carry.unpack()
    command = [sys.executable, "-m", "evidence.gpu", "--work", job.name, "--rows", str(options.rows.resolve())]
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(carry.CARRIED / "inductor"), "PYTHONUNBUFFERED": "1"}
    ended_with_this = partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)  # Linux: if this process is killed
    child = subprocess.Popen(command, cwd=carry.ROOT, start_new_session=True, preexec_fn=ended_with_this)
    try:
        status = child.wait(LIMIT)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        status = STOPPED
        print(f"{job.name}: stopped; the same command goes on.", flush=True)
    if options.out is not None:
        carry.pack(options.out.resolve())
        shutil.copytree(options.rows, options.out, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)
        for design in DESIGNS.values():
            for ledger in filter(Path.exists, (design.ledger, design.rates)):
                shutil.copy(ledger, options.out / f"ledger-{ledger.name}")
    return status


def work(job: Job, options: argparse.Namespace) -> int:
    """Measures what is left of a job, in this process; the code of some cases is generated in several before."""
    from evidence.gpu import rows

    cases, done = job.cases(options.dry)[: options.first], rows.newest(rows.read(options.rows, job.name))
    keys = {case.name: (job.name, case.name, *rows.card(), rows.code_digest(case.code)) for case in cases}
    options.rows.mkdir(parents=True, exist_ok=True)
    running = options.rows / f".{job.name}.running"  # its case was killed and is tried last
    killed = running.read_text() if running.exists() else ""
    left = [case for case in cases if keys[case.name] not in done]
    left.sort(key=lambda case: (case.name == killed, case.generate is not None))
    print(f"{job.name}: {len(cases) - len(left)} of {len(cases)} rows are there")
    about, failed = rows.about(), 0
    generators = [] if options.dry else [case.generate for case in left if case.generate]
    for number, case in enumerate(left, 1):
        if case.generate and generators:
            generate(generators, job.processes)
            generators = []
        running.write_text(case.name)
        began = time.monotonic()
        try:
            result = case.measure()
        except Exception as error:  # compilers and drivers raise errors of many classes; the other cases go on
            last = "".join(traceback.format_exception(error)[-3:])
            result = {"failed": f"{type(error).__name__}: {error}"[:500], "trace": last[-1500:]}
        result |= {"seconds": round(time.monotonic() - began, 2), "at": time.strftime("%Y-%m-%d %H:%M:%S")}
        key = dict(zip(rows.KEY, keys[case.name], strict=True))
        rows.append(options.rows, {**key, **result, "about": {**about, **rows.clocks()}})
        running.unlink()
        failed += "failed" in result
        shown = json.dumps(result.get("failed") or result["cells"], ensure_ascii=False)[:200]
        print(f"{job.name} {number}/{len(left)} {case.name}, {result['seconds']} s: {shown}")
    print(rows.section(rows.read(options.rows, job.name)))
    return FAILED if failed else 0


def generate(functions: Sequence[Callable[[], object]], processes: int) -> None:
    """Calls functions, each in a new process, for the code that they leave in the caches; the rest is thrown away."""
    import torch

    processes = min(processes, len(functions), os.cpu_count() or 1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
    began = time.monotonic()
    gc.collect()
    torch.cuda.empty_cache()  # what this process has measured before leaves the card's memory to them
    with ProcessPoolExecutor(processes, get_context("spawn"), set_up, max_tasks_per_child=1) as pool:
        calls = [pool.submit(function) for function in functions]
        for number, call in enumerate(as_completed(calls), 1):
            call.exception()  # what fails here fails again where it is measured, and says so
            print(f"    code of {number} of {len(calls)} cases after {time.monotonic() - began:.0f} s")
    del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]


def set_up() -> None:
    """What every process of a job begins with: caches that are shared, and timings of inductor that wait in line."""
    from evidence.gpu import carry

    carry.share_triton_cache(carry.CARRIED / "triton")
    carry.lock_autotuning(carry.CARRIED / "autotuning.lock")


if __name__ == "__main__":
    sys.exit(main())
