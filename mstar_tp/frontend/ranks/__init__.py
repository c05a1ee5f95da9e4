"""The ranks as the frontend sees them: their processes, their restarts, and requests on them."""
