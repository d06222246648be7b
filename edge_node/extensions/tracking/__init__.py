"""Experiment trackers that `--track` names, one file each: MLflow and TensorBoard."""
