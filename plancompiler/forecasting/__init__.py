"""What a job takes on a machine, known before it runs: memory, traffic, time."""

from __future__ import annotations

from plancompiler.forecasting.job_forecast import ClassForecast, Forecast, forecast

__all__ = ["ClassForecast", "Forecast", "forecast"]
