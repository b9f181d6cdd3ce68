"""What a run's folder holds: checkpoints, metrics, alarms."""
