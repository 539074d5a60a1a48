"""Prediction and scoring."""
