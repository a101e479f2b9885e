"""What a process can tell of its siblings."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from kvgate.edge.asgi import workers
from kvgate.edge.asgi.workers import SeveralWorkers, Workers, claim, find


@pytest.mark.parametrize(
    ("argv", "environ", "declared"),
    [
        (["/bin/uvicorn", "app:app", "--workers", "4"], {}, 4),
        (["/lib/uvicorn/__main__.py", "--workers=4", "app:app"], {}, 4),
        (["uvicorn", "app:app"], {"WEB_CONCURRENCY": "3"}, 3),
        (["uvicorn", "app:app", "--workers", "2"], {"WEB_CONCURRENCY": "3"}, 2),
        (["hypercorn", "-w", "4", "app"], {}, 4),
        (["hypercorn", "app"], {"WEB_CONCURRENCY": "3"}, None),
        (["granian", "app"], {"GRANIAN_WORKERS": "5"}, 5),
        (["gunicorn", "-w4", "app"], {}, 4),
        (["gunicorn", "app"], {"GUNICORN_CMD_ARGS": "--bind=x --workers=6"}, 6),
        (["fastapi", "run", "--workers", "4"], {}, 4),
        (["litestar", "run", "-W", "4"], {}, 4),
        (["uvicorn", "app:app"], {}, None),
        (["uvicorn", "app:app", "--workers", "many"], {}, None),
        (["mine.py", "--workers", "4"], {"WEB_CONCURRENCY": "4"}, None),
        ([], {}, None),
    ],
)
def test_the_number_of_workers_is_read_where_servers_take_it(
    argv: list[str], environ: dict[str, str], declared: int | None
) -> None:
    assert find(argv, environ) == Workers(declared, None)


def _claim_as(supervisor: int, most: int, name: str, results: object, done: object) -> None:
    try:
        results.put(claim(supervisor, most, name))  # type: ignore[attr-defined]
    except SeveralWorkers as error:
        results.put(str(error))  # type: ignore[attr-defined]
    done.wait()  # type: ignore[attr-defined]


def test_no_more_processes_claim_the_pool_than_may() -> None:
    context = multiprocessing.get_context("spawn")
    results, done = context.Queue(), context.Event()
    name = f"test-{os.getpid()}"
    started = [
        context.Process(target=_claim_as, args=(os.getpid(), 2, name, results, done)) for _ in range(3)
    ]
    for process in started:
        process.start()
    got = [results.get(timeout=30) for _ in started]
    done.set()
    for process in started:
        process.join(30)
    assert sorted(value for value in got if isinstance(value, int)) == [0, 1]
    (refused,) = [value for value in got if isinstance(value, str)]
    assert "more than 2 worker processes would each give out the pool" in refused
    # Their claims went with them.
    assert claim(os.getpid(), 1, name) == 0


def test_one_process_has_one_claim_however_often_it_asks() -> None:
    assert claim(os.getppid(), 1, "twice") == claim(os.getppid(), 1, "twice") == 0


def test_a_worker_knows_its_supervisor() -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(find, (["uvicorn", "--workers", "2"], {})) == workers.Workers(2, os.getpid())
