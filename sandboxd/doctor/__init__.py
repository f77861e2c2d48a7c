"""What a host carries: facts are read and judged, and bound what pools may have."""
