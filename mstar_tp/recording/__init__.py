"""Recordings of the order a rank applied, and what it agreed on: written while serving, read by
``mstar-tp replay``. No torch.
"""

from mstar_tp.recording.recorder import NO_RECORDING, FileRecorder, Recorder, recording_path

__all__ = ["NO_RECORDING", "FileRecorder", "Recorder", "recording_path"]
