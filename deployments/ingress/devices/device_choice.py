"""Choice of the device that runs a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import Device
from deployments.deadlines import remaining_s
from deployments.errors import HardwareUnavailable
from deployments.ingress.devices.cluster_state import ClusterMonitor, DeploymentState
from deployments.ingress.devices.device_forecasts import DeviceForecasts, RequestWork
from deployments.ingress.devices.placement import choose_forecast, choose_other_forecast
from deployments.ingress.request_options import HARDWARE_HEADERS, RequestOptions
from deployments.keys.caller import current_caller
from deployments.keys.key import Scope


class DeviceChoice(NamedTuple):
    """The device that runs a request.

    If the request preferred another device, `fallback` equals `device`. Otherwise it is None.
    """

    device: Device
    fallback: Device | None = None


class DeviceChooser:
    """Chooser of the device for each request, by its options, its key and the forecasts."""

    def __init__(self, monitor: ClusterMonitor, forecasts: DeviceForecasts) -> None:
        self.monitor = monitor
        self.forecasts = forecasts

    def choose(self, options: RequestOptions, work: RequestWork) -> DeviceChoice:
        """Choose the hardware that a request names, else the default of the settings.

        `auto` means the cheapest device whose forecast meets the deadline, else the fastest.

        Callers without the scope `gpu` get the CPU for `auto` and for an optional GPU, as in a
        cluster without GPUs. Raises Forbidden if such a caller requires a GPU. Raises
        HardwareUnavailable if neither the named device nor a permitted fallback can run the model.
        """
        states = self._usable_states(options, work)
        compute = self._requested_compute(options)
        with name_hardware_option(options):
            if compute != "auto":
                return prefer_device(
                    Device(compute),
                    work.model.manifest,
                    states,
                    is_required=options.requires_device,
                )
            devices = list_devices(work.model.manifest, states)
        if len(devices) == 1:
            return DeviceChoice(devices[0])
        forecasts = [self.forecasts.forecast(work, device) for device in devices]
        return DeviceChoice(choose_forecast(forecasts, self._deadline_s(options, work)).device)

    def choose_after_refusal(
        self, options: RequestOptions, work: RequestWork, refused: Device, deadline_s: float
    ) -> Device | None:
        """Return another device for a request that the device `refused` has refused.

        Returns None if the request does not use `auto`, or if no other device is forecast to meet
        the target or the request's deadline, `deadline_s`.
        """
        if self._requested_compute(options) != "auto":
            return None
        with name_hardware_option(options):
            devices = list_devices(work.model.manifest, self._usable_states(options, work))
        forecasts = [self.forecasts.forecast(work, device) for device in devices]
        target_s = min(self._deadline_s(options, work), remaining_s(deadline_s))
        other = choose_other_forecast(forecasts, refused, target_s)
        return None if other is None else other.device

    def _requested_compute(self, options: RequestOptions) -> str:
        return options.requested_compute or self.forecasts.settings.default

    def _usable_states(
        self, options: RequestOptions, work: RequestWork
    ) -> Mapping[Device, DeploymentState]:
        """Return the states of the devices, without the GPU if the caller may not use it.

        A request for the CPU keeps all states, because it never runs on another device. Raises
        Forbidden if the request requires a GPU and the caller may not use it.
        """
        states = self.monitor.states_for(work.model)
        if self._requested_compute(options) != "cpu" and Scope.GPU not in current_caller().scopes:
            if options.requires_device:
                current_caller().require_scope(Scope.GPU)
            states = {device: state for device, state in states.items() if device != Device.GPU}
        return states

    def _deadline_s(self, options: RequestOptions, work: RequestWork) -> float:
        """Return the seconds that the answer may take, from the request, else from the settings."""
        if options.deadline_ms is not None:
            return options.deadline_ms / 1e3
        settings = self.forecasts.settings
        return settings.generation_target_s if work.model.is_generative else settings.target_s


@contextmanager
def name_hardware_option(options: RequestOptions) -> Iterator[None]:
    """Add to HardwareUnavailable errors the request option that named the hardware, if any."""
    try:
        yield
    except HardwareUnavailable as error:
        if options.requested_compute is None:
            raise
        option = options.hardware_option
        raise HardwareUnavailable(
            f"{error.message}. Set `options.{option}` or the header `{HARDWARE_HEADERS[option]}` "
            "to another value, or omit it.",
            field=f"options.{option}",
        ) from error


def list_devices(
    manifest: ArtifactManifest, states: Mapping[Device, DeploymentState]
) -> list[Device]:
    """List the devices that can run the model. Raises HardwareUnavailable if none can."""
    devices = [device for device in Device if _check_device(device, manifest, states) is None]
    if not devices and (error := _check_device(Device.CPU, manifest, states)) is not None:
        raise error
    return devices


def prefer_device(
    device: Device,
    manifest: ArtifactManifest,
    states: Mapping[Device, DeploymentState],
    *,
    is_required: bool = False,
) -> DeviceChoice:
    """Choose `device`, or the CPU if `device` cannot run the model and is not required.

    A device can run a model if its deployment is available and the model has a graph for it.
    Raises HardwareUnavailable if a required `device` cannot run the model, or if neither `device`
    nor the CPU can run the model.
    """
    error = _check_device(device, manifest, states)
    if error is None:
        return DeviceChoice(device)
    if is_required or _check_device(Device.CPU, manifest, states) is not None:
        raise error
    return DeviceChoice(Device.CPU, fallback=Device.CPU)


def _check_device(
    device: Device, manifest: ArtifactManifest, states: Mapping[Device, DeploymentState]
) -> HardwareUnavailable | None:
    state = states.get(device)
    if state is None or not state.available:
        return HardwareUnavailable(f"this cluster runs no model on `{device}`")
    if manifest.candidate_for(device) is None:
        message = f"Model {manifest.id} has no graph for `{device}`"
        if device is Device.GPU:
            message += ". Build it again with `--force` on a host with a GPU"
        error = HardwareUnavailable(message)
        error.lacks_graph = True
        return error
    return None
