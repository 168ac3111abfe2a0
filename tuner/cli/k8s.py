"""`tune k8s`: a study as Kubernetes manifests, and the study on a cluster."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import sys
from typing import Any
from typing import TYPE_CHECKING

from search_space.errors import UserError


if TYPE_CHECKING:
    from search_space.job import Job
    from tuner.k8s.render import RenderOptions


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("k8s", help="a study on Kubernetes: render, submit, status, logs, stop")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text, run in (
        ("render", "print the manifests of a job", _render),
        ("submit", "start a study on the cluster", _submit),
    ):
        action = actions.add_parser(name, help=text)
        _add_job_options(action)
        action.set_defaults(run=run)
        if name == "render":
            action.add_argument(
                "--services",
                action="store_true",
                help="what studies share instead: accounts, network rules, storage, MLflow",
            )
        else:
            action.add_argument("--again", action="store_true", help="go on with a study whose last run has ended")
            action.add_argument("--context", help="context of the kubeconfig (default: its current one)")
    for name, text, run in (
        ("status", "what a study is doing, and what keeps it from running", _status),
        ("logs", "what a study printed", _logs),
        ("stop", "end a study in order; it can go on later", _stop),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("study", help="name that submit printed")
        _add_common(action)
        action.add_argument("--context", help="context of the kubeconfig (default: its current one)")
        if name == "logs":
            action.add_argument("--follow", "-f", action="store_true", help="go on until the study ends")
            action.add_argument("--tail", type=int, metavar="N", help="last lines only")
        action.set_defaults(run=run)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--namespace", "-n", default="ledgertune", help="namespace (default: ledgertune)")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _add_job_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB.toml", help="job file")
    _add_common(parser)
    parser.add_argument("--image", required=True, help="image built from our Dockerfile, with its tag or digest")
    parser.add_argument("--study", help="name of the study (default: the model and a hash of the job file)")
    parser.add_argument("--budget", help="device-hours in all: 40-gpu-hours (default: the job's)")
    parser.add_argument("--gpu-workers", type=int, metavar="N", help="worker pods (default: what one trial needs)")
    parser.add_argument(
        "--with",
        dest="components",
        action="append",
        default=[],
        metavar="COMPONENT",
        help="rdma, kueue, s3 or gpu-pool",
    )
    parser.add_argument("--node-selector", action="append", default=[], metavar="LABEL=VALUE", help="of workers")
    parser.add_argument("--toleration", action="append", default=[], metavar="KEY[=VALUE]:EFFECT", help="of workers")
    parser.add_argument("--worker-cpu", type=int, metavar="N", help="cores of a worker")
    parser.add_argument("--worker-memory", type=int, metavar="GIB", help="memory of a worker (GiB)")
    parser.add_argument("--env-secret", metavar="SECRET", help="Secret whose keys become environment variables")
    parser.add_argument("--wait", type=int, default=3600, metavar="S", help="longest wait for nodes (default: 3600 s)")


def _options(args: argparse.Namespace) -> tuple[Job, str, RenderOptions]:
    """The job, its text, and what the command line adds.

    Raises:
        UserError: the file cannot be read, or an option is malformed.
    """
    from search_space.job_file import load_job
    from tuner.budget import parse_budget
    from tuner.k8s.render import RenderOptions

    for name in ("gpu_workers", "worker_cpu", "worker_memory", "wait"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: at least 1")
    job = load_job(args.job)
    options = RenderOptions(
        image=args.image,
        namespace=args.namespace,
        study=args.study,
        budget_s=parse_budget(args.budget) if args.budget else None,
        gpu_workers=args.gpu_workers,
        components=tuple(args.components),
        node_selector=dict(_pair(text) for text in args.node_selector),
        tolerations=tuple(_toleration(text) for text in args.toleration),
        worker_cpu=args.worker_cpu,
        worker_memory_gib=args.worker_memory,
        env_secret=args.env_secret,
        wait_s=args.wait,
    )
    return job, Path(args.job).read_text(), options


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UserError(f"--node-selector {text!r}: needs LABEL=VALUE")
    return key, value


def _toleration(text: str) -> dict[str, str]:
    taint, _, effect = text.rpartition(":")
    if not taint or effect not in ("NoSchedule", "NoExecute", "PreferNoSchedule"):
        raise UserError(f"--toleration {text!r}: needs KEY[=VALUE]:NoSchedule (or NoExecute, PreferNoSchedule)")
    key, equals, value = taint.partition("=")
    if equals:
        return {"key": key, "operator": "Equal", "value": value, "effect": effect}
    return {"key": key, "operator": "Exists", "effect": effect}


def _render(args: argparse.Namespace) -> int:
    from tuner.k8s.render import render
    from tuner.k8s.render import study_name

    job, text, options = _options(args)
    manifests = render(job, text, options, services=args.services)
    if args.json:
        facts = {"study": study_name(job, text, options), "namespace": options.namespace, "manifests": manifests}
        print(json.dumps(facts))
        return 0
    import yaml

    print(yaml.safe_dump_all(manifests, sort_keys=False, width=120), end="")
    return 0


def _submit(args: argparse.Namespace) -> int:
    from tuner.k8s.api import Api
    from tuner.k8s.render import render
    from tuner.k8s.studies import submit

    job, text, options = _options(args)
    config, rayjob = render(job, text, options)
    done = submit(Api(options.namespace, args.context), config, rayjob, args.again)
    if args.json:
        print(json.dumps(done))
        return 0
    name = done["study"]
    print(f"study {name} is submitted to namespace {options.namespace}")
    print(f"look: tune k8s status {name}\nfollow: tune k8s logs {name} --follow\nend: tune k8s stop {name}")
    return 0


def _status(args: argparse.Namespace) -> int:
    from tuner.k8s.api import Api
    from tuner.k8s.studies import status

    found = status(Api(args.namespace, args.context), args.study)
    if args.json:
        print(json.dumps({"study": args.study, "namespace": args.namespace, **found.to_json()}))
        return 0
    print(f"study {args.study}: {found.text}")
    for pod in found.pods:
        print(f"  {pod['role']:<10} {pod['phase']:<10} {pod['name']}")
    return 0


def _logs(args: argparse.Namespace) -> int:
    from tuner.k8s.api import Api
    from tuner.k8s.studies import logs

    lines = logs(Api(args.namespace, args.context), args.study, args.follow, args.tail)
    if args.json:
        print(json.dumps({"study": args.study, "namespace": args.namespace, "lines": list(lines)}))
        return 0
    for line in lines:
        print(line)
        sys.stdout.flush()
    return 0


def _stop(args: argparse.Namespace) -> int:
    from tuner.k8s.api import Api
    from tuner.k8s.studies import stop

    done = stop(Api(args.namespace, args.context), args.study)
    if args.json:
        print(json.dumps(done))
        return 0
    print(f"study {args.study} is stopped; `tune k8s submit JOB.toml --study {args.study}` goes on with it")
    return 0
