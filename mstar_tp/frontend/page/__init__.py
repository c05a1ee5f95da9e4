"""The status page at ``/`` and the debug routes that it polls."""
