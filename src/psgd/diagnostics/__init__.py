"""Curvature to look at: reports on P alone and beside the Hessian, spectra, flatness, pictures, logs."""
