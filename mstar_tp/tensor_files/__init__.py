"""Reading and writing safetensors files of unknown origin, within stated memory bounds."""
