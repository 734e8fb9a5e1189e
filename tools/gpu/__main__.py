"""What only a GPU can tell: a queue of jobs of at most nine minutes that resume; see docs/contribute/gpu.md."""

import argparse
import ctypes
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

from tools.gpu.jobs import JOBS, QUEUE, Job

LIMIT = 520.0  # seconds of a job: a machine may be lent in commands of ten minutes, and files have to come back
FAILED, MISSING, STOPPED = 1, 2, 3
ROWS = Path(__file__).parent / "rows"


def main() -> int:
    options = arguments()
    if options.work:
        set_up()
        return work(JOBS[options.work], options)
    if options.list:
        for job in QUEUE:
            print(f"{job.name:11} {job.minutes} min  {state(job, options.rows)[0]:15}  {job.decides}")
    elif options.prepare:
        from tools.gpu import carry

        print(carry.prepare([case.generate for case in JOBS["sweep"].cases(False) if case.generate]))
    elif options.tables:
        from tools.gpu.tables import write_tables

        write_tables(options.rows)
    elif options.dry:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        import torch

        torch.compile = partial(torch.compile, backend="eager")  # with inductor toys would take minutes
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            options.rows = Path(folder) if options.rows == ROWS else options.rows
            return max(work(JOBS[name], options) for name in options.jobs or JOBS)
    else:
        return run(options)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"{', '.join(JOBS)} (default: the first unfinished)")
    parser.add_argument("--list", action="store_true", help="what each job decides, minutes, state")
    parser.add_argument("--dry", action="store_true", help="run every job on the CPU at toy sizes; keep no rows")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N cases of every job")
    parser.add_argument("--prepare", action="store_true", help="compile into build/gpu what a GPU machine takes along")
    parser.add_argument("--tables", action="store_true", help="write the tables of the page from the rows")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="copy rows and caches there after every job")
    parser.add_argument("--rows", type=Path, metavar="FOLDER", default=ROWS, help="where the rows are")
    parser.add_argument("--work", choices=JOBS, help=argparse.SUPPRESS)  # the process that a job runs in
    options = parser.parse_args()
    if unknown := [name for name in options.jobs if name not in JOBS]:
        parser.error(f"there is no job {', '.join(unknown)}, expected {', '.join(JOBS)}")
    return options


def run(options: argparse.Namespace) -> int:
    """Runs the named jobs, or the first one that is not finished, if this machine has what they need."""
    chosen = [JOBS[name] for name in options.jobs]
    chosen = chosen or [job for job in QUEUE if not state(job, options.rows)[1]][:1]
    if not chosen:
        print("Every job has all its rows on one card; name jobs to run them on another.")
        return 0
    if lacking := missing(chosen):
        print(f"tools.gpu: this machine lacks {', '.join(lacking)}: install that, or name other jobs.", file=sys.stderr)
        return MISSING
    return max(supervise(job, options) for job in chosen)


def missing(jobs: Sequence[Job]) -> list[str]:
    """What this machine lacks for the jobs."""
    needed = dict.fromkeys(["torch", "triton", *(name for job in jobs for name in job.needs)])
    lacking = [name for name in needed if find_spec(name) is None]
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        lacking.append("a C compiler, with which Triton starts kernels")
    if not lacking:
        import torch

        lacking += [] if torch.cuda.is_available() else ["a GPU that torch sees"]
    return lacking


def state(job: Job, folder: Path) -> tuple[str, bool]:
    """The state of a job in words, and whether it is finished: every case has a row on one card."""
    from tools.gpu import rows

    cases = {case.name: rows.code_digest(case.code, exact=False) for case in job.cases(False)}
    found = rows.read(folder, job.name)
    card, count = rows.most_complete(cases, found)
    where = f" on {card}" if count else ", and rows of older code" if found else ""
    finished = count == len(cases)
    return f"{'finished: ' * finished}{count} of {len(cases)} rows{where}", finished


def supervise(job: Job, options: argparse.Namespace) -> int:
    """Runs a job in a process of its own, and ends it with all its children when its time is over."""
    from tools.gpu import carry

    carry.unpack()
    began, running = time.monotonic(), options.rows / f".{job.name}.running"
    command = [sys.executable, "-m", "tools.gpu", "--work", job.name, "--rows", str(options.rows.resolve())]
    command += ["--first", str(options.first)] if options.first else []
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(carry.CARRIED / "inductor"), "PYTHONUNBUFFERED": "1"}
    ended_with_this = partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)  # Linux: if this process is killed
    environment = {**os.environ, **settings}
    child = subprocess.Popen(
        command, cwd=carry.ROOT, env=environment, start_new_session=True, preexec_fn=ended_with_this
    )
    try:
        status = child.wait(LIMIT)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        status, took = STOPPED, round(time.monotonic() - began)
        if running.exists():
            from tools.gpu import rows

            rows.append(options.rows, json.loads(running.read_text()) | {"stopped": took})
        print(f"{job.name}: stopped after {took} s; the same command goes on.", flush=True)
    running.unlink(missing_ok=True)
    if options.out is not None:
        carry.bring_back(options.rows / f"{job.name}.jsonl", options.out.resolve())
    return status


def work(job: Job, options: argparse.Namespace) -> int:
    """Measures what is left of a job, in this process; the code of some cases is generated in several before."""
    from tools.gpu import rows, tables

    cases, found = job.cases(options.dry)[: options.first], rows.read(options.rows, job.name)
    keys = {case.name: rows.Key(job.name, case.name, *rows.card(), rows.code_digest(case.code)) for case in cases}
    done, tried = rows.finished(found), {rows.key_of(row) for row in found if "stopped" in row}
    left = sorted((case for case in cases if keys[case.name] not in done), key=lambda case: keys[case.name] in tried)
    print(f"{job.name}: {len(cases) - len(left)} of {len(cases)} rows are there")
    about, running, failed = rows.about(), options.rows / f".{job.name}.running", 0
    options.rows.mkdir(parents=True, exist_ok=True)
    for begin in range(0, len(left), job.together):
        some = left[begin : begin + job.together]
        if not options.dry:
            generate([case.generate for case in some if case.generate], job.processes)
        for number, case in enumerate(some, begin + 1):
            key = keys[case.name]._asdict()
            running.write_text(json.dumps(key))
            began = time.monotonic()
            try:
                result = case.measure()
            except Exception as error:  # compilers and drivers raise errors of many classes; the other cases go on
                last = "".join(traceback.format_exception(error)[-3:])
                result = {"failed": f"{type(error).__name__}: {error}"[:500], "trace": last[-1500:]}
            facts = {"seconds": round(time.monotonic() - began, 2), "at": time.strftime("%Y-%m-%d %H:%M:%S")}
            rows.append(options.rows, {**key, **result, **facts, "about": {**about, **rows.clocks()}})
            failed += "failed" in result
            shown = json.dumps(result.get("failed") or result["cells"], ensure_ascii=False)[:200]
            print(f"{job.name} {number}/{len(left)} {case.name}, {facts['seconds']} s: {shown}")
    print(tables.section(rows.read(options.rows, job.name)))
    return FAILED if failed else 0


def generate(functions: Sequence[Callable[[], object]], processes: int) -> None:
    """Calls functions, each in a new process, for the code that they leave in the caches; the rest is thrown away."""
    processes = min(processes, len(functions), os.cpu_count() or 1)
    if not processes:
        return
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
    began = time.monotonic()
    with ProcessPoolExecutor(processes, get_context("spawn"), set_up, max_tasks_per_child=1) as pool:
        calls = [pool.submit(function) for function in functions]
        for number, call in enumerate(as_completed(calls), 1):
            call.exception()  # what fails here fails again where it is measured, and says so
            took = time.monotonic() - began
            print(f"    code of {number} of {len(calls)} cases, {took:.0f} s, {processes} processes")
    del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]


def set_up() -> None:
    """What every process of a job begins with: caches that are shared, and timings of inductor that wait in line."""
    from tools.gpu import carry

    carry.share_triton_cache(carry.CARRIED / "triton")
    carry.lock_autotuning(carry.CARRIED / "autotuning.lock")


if __name__ == "__main__":
    sys.exit(main())
