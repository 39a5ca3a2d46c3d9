"""The environments of this package under other training libraries; each module imports its library only when used."""
