"""The coefficients of the ledger: names, units, shipped priors, and the key they are valid for."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import numpy as np

from search_space.errors import UserError
from search_space.setting import Setting


@dataclass(frozen=True, kw_only=True)
class Coefficient:
    """One named coefficient; lognormal, so it stays positive."""

    name: str
    """Stable name."""

    value: float
    """Prior median on a GPU, in ``unit``."""

    sigma: float
    """Prior standard deviation of its natural logarithm on a GPU."""

    cpu: tuple[float, float]
    """The same two on CPU slots with gloo."""

    unit: str
    """Unit of the value."""

    help: str
    """What it scales."""


TABLE = (
    Coefficient(
        name="gemm_efficiency",
        value=0.80,
        sigma=0.12,
        cpu=(0.8, 0.6),
        unit="share of peak",
        help="matrix products of unlimited size",
    ),
    Coefficient(
        name="gemm_half_size",
        value=160.0,
        sigma=0.5,
        cpu=(32.0, 0.8),
        unit="elements",
        help="a product's dimension that adds as much time again",
    ),
    Coefficient(
        name="attention_efficiency",
        value=0.45,
        sigma=0.3,
        cpu=(0.3, 0.8),
        unit="share of peak",
        help="fused attention, on the products it really computes",
    ),
    Coefficient(
        name="memory_efficiency",
        value=0.75,
        sigma=0.15,
        cpu=(0.5, 0.8),
        unit="share of memory bandwidth",
        help="norms, activations, residuals, optimizer",
    ),
    Coefficient(
        name="launch_s",
        value=6e-6,
        sigma=0.4,
        cpu=(3e-5, 1.0),
        unit="s",
        help="CPU time to issue one kernel",
    ),
    Coefficient(
        name="pipeline_host",
        value=1.15,
        sigma=0.3,
        cpu=(1.2, 0.5),
        unit="ratio",
        help="host time of a block in a pipeline with tensor parallelism over that without a pipeline",
    ),
    Coefficient(
        name="host_growth",
        value=0.1,
        sigma=0.8,
        cpu=(0.1, 0.8),
        unit="exponent",
        help="growth of that host time with tensor-parallel ranks: every collective waits for the slowest host",
    ),
    Coefficient(
        name="network_host",
        value=0.3,
        sigma=0.6,
        cpu=(0.3, 0.8),
        unit="exponent",
        help="growth of host time with the nodes that a tensor-parallel group spans",
    ),
    Coefficient(
        name="domain_share",
        value=0.7,
        sigma=0.25,
        cpu=(0.5, 1.0),
        unit="share of link bandwidth",
        help="collectives inside the fast domain",
    ),
    Coefficient(
        name="network_share",
        value=0.75,
        sigma=0.3,
        cpu=(0.5, 1.0),
        unit="share of link bandwidth",
        help="collectives that cross nodes",
    ),
    Coefficient(
        name="latency_s",
        value=1.2e-5,
        sigma=0.5,
        cpu=(2e-4, 1.0),
        unit="s",
        help="start of one collective",
    ),
    Coefficient(
        name="tensor_exposed",
        value=0.9,
        sigma=0.2,
        cpu=(1.0, 0.3),
        unit="share",
        help="tensor-parallel communication that nothing hides",
    ),
    Coefficient(
        name="data_exposed",
        value=0.25,
        sigma=0.5,
        cpu=(0.9, 0.5),
        unit="share",
        help="data-parallel communication that stays visible although compute could hide it",
    ),
    Coefficient(
        name="pipeline_exposed",
        value=0.6,
        sigma=0.5,
        cpu=(0.9, 0.5),
        unit="share",
        help="stage-to-stage transfers that nothing hides",
    ),
    Coefficient(
        name="straggler_share",
        value=0.01,
        sigma=0.7,
        cpu=(0.03, 1.0),
        unit="share of busy time per doubling of nodes",
        help="waiting for the slowest rank",
    ),
    Coefficient(
        name="data_wait_share",
        value=0.003,
        sigma=0.5,
        cpu=(0.01, 1.0),
        unit="share of busy time",
        help="waiting for the data loader",
    ),
    Coefficient(
        name="step_overhead_s",
        value=0.01,
        sigma=0.7,
        cpu=(0.03, 1.0),
        unit="s",
        help="host work per step: gradient norm, optimizer start, logging",
    ),
    Coefficient(
        name="model_error",
        value=0.06,
        sigma=0.5,
        cpu=(0.15, 0.5),
        unit="log units",
        help="spread of step times that the model leaves unexplained",
    ),
    Coefficient(
        name="activation_factor",
        value=1.0,
        sigma=0.06,
        cpu=(1.3, 0.3),
        unit="ratio",
        help="activation bytes over the itemised account",
    ),
    Coefficient(
        name="reserved_factor",
        value=1.025,
        sigma=0.03,
        cpu=(1.05, 0.1),
        unit="ratio",
        help="reserved over allocated memory",
    ),
    Coefficient(
        name="fixed_bytes",
        value=0.6 * 1024**3,
        sigma=0.4,
        cpu=(0.4 * 1024**3, 0.5),
        unit="bytes",
        help="device context and library workspaces",
    ),
)
"""Every coefficient, in the order of the vectors."""

NAMES = tuple(coefficient.name for coefficient in TABLE)
"""Names in order."""

INDEX = {name: i for i, name in enumerate(NAMES)}
"""Position of each name."""


@dataclass(frozen=True)
class Coefficients:
    """Values with their uncertainty, valid for one hardware and framework version."""

    values: tuple[float, ...]
    """Medians, in the units of :data:`TABLE`."""

    log_covariance: tuple[tuple[float, ...], ...]
    """Covariance of the natural logarithms."""

    hardware: str
    """Name of the device kind that they hold for."""

    framework: str
    """Framework and version that they hold for."""

    observations: int = 0
    """Measured trials that went in."""

    def value(self, name: str) -> float:
        """The median of one coefficient."""
        return self.values[INDEX[name]]

    def sigma(self, name: str) -> float:
        """Standard deviation of the logarithm of one coefficient."""
        i = INDEX[name]
        return float(np.sqrt(self.log_covariance[i][i]))

    def log_values(self) -> np.ndarray:
        """Logarithms of the values, shape (k,)."""
        return np.log(np.array(self.values))

    def covariance(self) -> np.ndarray:
        """Covariance of the logarithms, shape (k, k)."""
        return np.array(self.log_covariance)

    def with_logs(self, log: np.ndarray, covariance: np.ndarray | None) -> Coefficients:
        """A copy with other values (and covariance, where one is given)."""
        matrix = self.log_covariance if covariance is None else tuple(tuple(map(float, row)) for row in covariance)
        return replace(self, values=tuple(float(v) for v in np.exp(log)), log_covariance=matrix)

    def with_value(self, name: str, value: float) -> Coefficients:
        """A copy with one value changed."""
        values = list(self.values)
        values[INDEX[name]] = value
        return replace(self, values=tuple(values))

    def check(self, setting: Setting) -> None:
        """Refuse a setting that these coefficients were not made for.

        Raises:
            UserError: hardware or framework differ.
        """
        hardware, framework = key_of(setting)
        if (hardware, framework) != (self.hardware, self.framework):
            raise UserError(
                f"coefficients are for {self.hardware} with {self.framework}, the job runs {hardware} with "
                f"{framework}; calibrate again on this hardware and version"
            )

    def to_json(self) -> dict[str, Any]:
        """Every coefficient by name with value, uncertainty and unit, and the key."""
        return {
            "hardware": self.hardware,
            "framework": self.framework,
            "observations": self.observations,
            "coefficients": {
                c.name: {"value": self.value(c.name), "log_sigma": self.sigma(c.name), "unit": c.unit} for c in TABLE
            },
            "log_covariance": [list(row) for row in self.log_covariance],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Coefficients:
        """The inverse of :meth:`to_json`.

        Raises:
            UserError: names are missing, as in a file of another version of this program.
        """
        entries = values.get("coefficients", {})
        missing = [name for name in NAMES if name not in entries]
        if missing or "log_covariance" not in values:
            raise UserError(
                f"coefficients: no entry for {', '.join(missing) or 'log_covariance'}; "
                "the file is of another version, delete it to start from the shipped priors"
            )
        return cls(
            values=tuple(float(entries[name]["value"]) for name in NAMES),
            log_covariance=tuple(tuple(map(float, row)) for row in values["log_covariance"]),
            hardware=values["hardware"],
            framework=values["framework"],
            observations=int(values.get("observations", 0)),
        )


def key_of(setting: Setting) -> tuple[str, str]:
    """Hardware and framework with version that coefficients for a setting are filed under."""
    version = setting.versions.get(setting.framework, "")
    return setting.hardware.name, f"{setting.framework} {version}".strip()


def prior(setting: Setting) -> Coefficients:
    """The shipped priors for a setting's kind of device: medians and independent log standard deviations."""
    pairs = [c.cpu if setting.on_cpu else (c.value, c.sigma) for c in TABLE]
    hardware, framework = key_of(setting)
    covariance = np.diag([sigma**2 for _, sigma in pairs])
    return Coefficients(
        values=tuple(value for value, _ in pairs),
        log_covariance=tuple(tuple(map(float, row)) for row in covariance),
        hardware=hardware,
        framework=framework,
    )
