"""A KubeRay manifest: a RayJob that starts one torchrun a node, with its config function in a ConfigMap.

The API is ``ray.io/v1`` of KubeRay 1.x. The manifest is plain YAML text, written here so that it needs no YAML package.
"""

from __future__ import annotations

import json
import textwrap

from tuner.export.subject import commented
from tuner.export.subject import Export
from tuner.export.subject import Subject
from tuner.export.torchtitan_module import gaps_of
from tuner.export.torchtitan_module import module


LAUNCH = '''
"""Start one torchrun on every node of the Ray cluster and wait for all of them."""

import os
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, DEVICES, NAME = {nodes}, {devices}, {name!r}
ENV = {env!r}


@ray.remote
class Node:
    def address(self):
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def train(self, rank, address, port):
        command = [
            "torchrun", "--nproc-per-node", str(DEVICES), "--nnodes", str(NODES), "--node-rank", str(rank),
            "--master-addr", address, "--master-port", str(port), "-m", "torchtitan.train", "--module", NAME,
            "--config", NAME,
        ]
        path = os.pathsep.join(filter(None, ["/config", os.environ.get("PYTHONPATH")]))
        print("node", rank, "runs", command, ENV, flush=True)
        return subprocess.run(command, env=os.environ | ENV | {{"PYTHONPATH": path}}).returncode


ray.init()
group = placement_group([{{"GPU": DEVICES, "CPU": 1}}] * NODES, strategy="STRICT_SPREAD")
ray.get(group.ready())
nodes = [
    Node.options(
        num_gpus=DEVICES,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
    ).remote()
    for i in range(NODES)
]
address, port = ray.get(nodes[0].address.remote())
sys.exit(max(map(abs, ray.get([node.train.remote(i, address, port) for i, node in enumerate(nodes)]))))
'''


def export(subject: Subject) -> Export:
    """The manifest.

    Raises:
        UserError: the job names no torchtitan function, or the batch does not divide.
    """
    setting = subject.setting
    gaps = tuple(gap for gap in gaps_of(subject) if gap.knob != "env")
    name = subject.function.replace("_", "-")[:50].strip("-")
    launch = LAUNCH.strip("\n").format(
        nodes=setting.nodes, devices=setting.devices_per_node, name=subject.function, env=subject.env
    )
    notes = [
        "kubectl apply -f FILE; set the image to one with torch, torchtitan and ray of the versions that were measured"
    ]
    files = {f"{subject.function}.py": module(subject), "launch.py": launch}
    lines = [*commented(subject, gaps, notes, "#"), *_config_map(name, files), "---", *_job(name, subject)]
    return Export(text="\n".join(lines) + "\n", file=f"{name}.yaml", gaps=gaps)


def _config_map(name: str, files: dict[str, str]) -> list[str]:
    lines = ["apiVersion: v1", "kind: ConfigMap", "metadata:", f"  name: {name}-config", "data:"]
    for file, text in files.items():
        lines += [f"  {file}: |", *textwrap.indent(text.rstrip("\n"), "    ").splitlines()]
    return lines


def _job(name: str, subject: Subject) -> list[str]:
    setting = subject.setting
    container = [
        "- name: ray",
        "  image: REPLACE/with-torchtitan-and-ray:tag",
        "  env:",
        *[f"  - {{name: {key}, value: {json.dumps(value)}}}" for key, value in sorted(subject.env.items())],
        "  volumeMounts:",
        "  - {name: config, mountPath: /config}",
        "  - {name: shm, mountPath: /dev/shm}",
    ]
    if not subject.env:
        container.remove("  env:")
    volumes = [
        "volumes:",
        f"- {{name: config, configMap: {{name: {name}-config}}}}",
        "- {name: shm, emptyDir: {medium: Memory}}",
    ]
    head = [*container, "  resources:", "    requests: {cpu: '2', memory: 8Gi}", "    limits: {memory: 8Gi}"]
    devices = f"nvidia.com/gpu: {setting.devices_per_node}"
    worker = [*container, "  resources:", f"    requests: {{{devices}}}", f"    limits: {{{devices}}}"]
    return [
        "apiVersion: ray.io/v1",
        "kind: RayJob",
        "metadata:",
        f"  name: {name}",
        "spec:",
        "  entrypoint: python /config/launch.py",
        "  shutdownAfterJobFinishes: true",
        "  rayClusterSpec:",
        "    headGroupSpec:",
        "      rayStartParams: {num-cpus: '0'}",
        "      template:",
        "        spec:",
        "          containers:",
        *[f"          {line}" for line in head],
        *[f"          {line}" for line in volumes],
        "    workerGroupSpecs:",
        "    - groupName: trainers",
        f"      replicas: {setting.nodes}",
        f"      minReplicas: {setting.nodes}",
        f"      maxReplicas: {setting.nodes}",
        "      rayStartParams: {}",
        "      template:",
        "        spec:",
        "          containers:",
        *[f"          {line}" for line in worker],
        *[f"          {line}" for line in volumes],
    ]
