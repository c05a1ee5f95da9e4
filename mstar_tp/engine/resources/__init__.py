"""Resources that steps need and requests hold: KV pages and adapter slots."""
