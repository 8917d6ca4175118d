"""Checking of device names, without importing torch."""

import re

from bertsmith.errors import SettingsError


def check_device_name(device: str, option: str) -> None:
    """Raise SettingsError unless a device name is "auto", "cpu", "cuda" or "cuda:N".

    Args:
        device: The device name.
        option: The option or setting that has this value, for the message.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", device):
        raise SettingsError(f"{option} {device}: expected auto, cpu, cuda or cuda:N")
