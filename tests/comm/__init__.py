"""Tests of meetings, transactions, and strangers at the door."""
