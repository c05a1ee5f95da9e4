"""Recordings of the order a rank applied, and of what it agreed on. No torch.

They are written while serving and read by ``mstar-tp replay``.
"""

from mstar_tp.recording.recorder import NO_RECORDING, FileRecorder, Recorder, recording_path

__all__ = ["NO_RECORDING", "FileRecorder", "Recorder", "recording_path"]
