# One image for every service; what a container runs is its command.
#   docker build -t rookery .
#   docker build -t rookery:cuda --build-arg TORCH=cuda .
ARG PYTHON=python:3.11-slim

# --- packages: they change seldom, so they are a layer of their own ------------------------------------------
FROM ${PYTHON} AS packages
# cpu or cuda; TORCH_INDEX names a package index that has that build, if the default one has not.
ARG TORCH=cpu
ARG TORCH_INDEX=
COPY pyproject.toml constraints.txt /build/
WORKDIR /build
RUN --mount=type=cache,target=/root/.cache/pip python -m venv /opt/venv \
 && torch="$(grep '^torch==' constraints.txt)" \
 && case "$TORCH-$(uname -m)" in \
      cpu-x86_64) torch="$torch+cpu" ;; \
      cpu-*|cuda-*) ;; \
      *) echo "TORCH=$TORCH: write cpu or cuda" >&2; exit 2 ;; \
    esac \
 && { /opt/venv/bin/pip install "$torch" -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
      || { echo "no $torch to be had; --build-arg TORCH_INDEX=URL names an index that has it" >&2; exit 1; }; } \
 && python -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))' \
      > requirements.txt \
 && /opt/venv/bin/pip install -r requirements.txt -c constraints.txt
RUN /opt/venv/bin/python -c 'import sys, torch; \
      has, wanted = "cuda" if torch.version.cuda else "cpu", sys.argv[1]; \
      sys.exit(None if has == wanted else f"TORCH={wanted}, but this torch is built for {has}")' "$TORCH" \
 # What only developers of these packages need, a fifth of all of it.
 && cd /opt/venv/lib/python3*/site-packages \
 && rm -rf torch/include torch/test torch/share torch/lib/*.a pip pip-* setuptools setuptools-* \
 && find torch/bin -type f ! -name torch_shm_manager -delete \
 && find . -type d -name tests \
      \( -path './numba/*' -o -path './sympy/*' -o -path './networkx/*' -o -path './matplotlib/*' \) \
      -prune -exec rm -rf {} + \
 && /opt/venv/bin/python -c 'import matplotlib.pyplot, numba, torch'

# --- kernels: replay's inner loops, compiled once for this kind of machine -----------------------------------
FROM packages AS kernels
ENV PATH=/opt/venv/bin:$PATH NUMBA_CACHE_DIR=/opt/kernels
WORKDIR /app
COPY shared shared
COPY services/__init__.py services/__init__.py
COPY services/replay services/replay
RUN python -m services.replay.compile

# --- the image -----------------------------------------------------------------------------------------------
FROM ${PYTHON}
RUN groupadd --gid 10001 rookery && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp rookery \
 && install -d -o rookery -g rookery -m 0700 /keys /data \
 && printf '#!/opt/venv/bin/python\nimport sys\nfrom rookery.cli import main\nsys.exit(main())\n' > /usr/local/bin/rookery \
 && chmod 0755 /usr/local/bin/rookery
COPY --from=packages /opt/venv /opt/venv
COPY --from=kernels /opt/kernels /opt/kernels
WORKDIR /app
COPY . .
RUN /opt/venv/bin/python -m compileall -q .
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONDONTWRITEBYTECODE=1 \
    OMP_NUM_THREADS=1 \
    MPLCONFIGDIR=/tmp/matplotlib \
    NUMBA_CACHE_DIR=/tmp/kernels \
    ROOKERY_RUN__DIR=/data \
    ROOKERY_RUN__STAY=true \
    ROOKERY_RUN__HEALTH_SOCKET=/tmp/health.sock \
    ROOKERY_SECURITY__KEYS=/keys
USER rookery
# The service itself says whether it is ready. Seldom, because each time is a process; often while it starts.
HEALTHCHECK --interval=20s --timeout=5s --retries=2 --start-period=60s --start-interval=1s \
  CMD ["python", "-m", "shared.health"]
CMD ["rookery", "--help"]
