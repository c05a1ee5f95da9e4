"""Counters and histograms of the frontend and of ranks, for Prometheus and OpenTelemetry."""
