"""Runnable recipes, shipped as package data."""
