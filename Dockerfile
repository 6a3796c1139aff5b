# The images of flashmoe: base -> toolchain -> build -> test, and bench. `nox -s image` builds them; plain
# `docker build --target bench .` with BuildKit does the same.
#
# Nothing comes from a moving archive: the bases are digests (docker/bases.toml, rewritten by `nox -s image -- --pin`),
# everything else comes from lockfiles/ by hash. No package is installed by apt. A base must hold Python 3.10 to 3.12 with
# venv, and for the build stages g++ and git. Where no registry can be reached, `nox -s base_image` makes one from Debian
# packages, to be named in BASE_BUILD and BASE_RUN.

ARG BASE_BUILD=python:3.12-bookworm@sha256:80f5d259a5969c86f6c92145d572de4a68c68e0edd28d4367dec0fb411b42af3
ARG BASE_RUN=python:3.12-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254

# ---- base: an unprivileged user and a work folder
FROM ${BASE_BUILD} AS base
RUN useradd --create-home --uid 10001 flashmoe && install -d -o flashmoe -g flashmoe /home/flashmoe/src
USER 10001
WORKDIR /home/flashmoe/src
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 UV_NO_PROGRESS=1 UV_LINK_MODE=copy
# What making an environment needs, and no more: editing a kernel does not install torch again.
COPY --chown=flashmoe:flashmoe nox noxfile.py pyproject.toml ./
COPY --chown=flashmoe:flashmoe lockfiles lockfiles
COPY --chown=flashmoe:flashmoe docker/with-ca docker/with-ca
COPY --chown=flashmoe:flashmoe flashmoe/__init__.py flashmoe/_version.py flashmoe/errors.py flashmoe/progress.py flashmoe/
COPY --chown=flashmoe:flashmoe flashmoe_build/__init__.py flashmoe_build/environment.py flashmoe_build/lock.py flashmoe_build/

# ---- toolchain: the locked compiler environment
FROM base AS toolchain
RUN --mount=type=secret,id=ca,uid=10001 \
    --mount=type=cache,target=/home/flashmoe/.cache,uid=10001,gid=10001 \
    docker/with-ca ./nox -s environments -- build

# ---- build: the wheel, its symbols and resources proved
FROM toolchain AS build
ARG FLASHMOE_ARCHS=all
COPY --chown=flashmoe:flashmoe . .
RUN ./nox -s build symbols && sha256sum dist/*.whl

# ---- runtime: the locked environment that runs, tests and times the wheel
FROM base AS runtime
RUN --mount=type=secret,id=ca,uid=10001 \
    --mount=type=cache,target=/home/flashmoe/.cache,uid=10001,gid=10001 \
    docker/with-ca ./nox -s environments -- test

# ---- test: the suite against the wheel of the build stage
FROM runtime AS test
COPY --chown=flashmoe:flashmoe . .
COPY --from=build --chown=flashmoe:flashmoe /home/flashmoe/src/dist dist
COPY --from=build --chown=flashmoe:flashmoe /home/flashmoe/src/build/reports build/reports
ENTRYPOINT ["docker/test-entrypoint"]

# ---- bench: `docker run --rm [--gpus all] -v "$PWD/results:/results" flashmoe-bench`
FROM ${BASE_RUN} AS bench
ARG REVISION=unknown
ARG VERSION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="flashmoe-bench" \
      org.opencontainers.image.description="Times flashmoe's attention kernels against torch's own" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN useradd --create-home --uid 10001 flashmoe && install -d -o flashmoe -g flashmoe -m 0777 /results
COPY --from=runtime --chown=root:root /home/flashmoe/src/.nox/env /home/flashmoe/src/.nox/env
COPY --from=build --chown=root:root /home/flashmoe/src/dist /opt/flashmoe/dist
COPY --chown=root:root docker/bench-entrypoint /usr/local/bin/bench-entrypoint
RUN for python in /home/flashmoe/src/.nox/env/*/bin/python; do \
      ln -s "$python" /usr/local/bin/flashmoe-python && \
      "$python" -m zipfile -e /opt/flashmoe/dist/*.whl "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
    done
USER 10001
WORKDIR /results
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 MPLCONFIGDIR=/tmp/matplotlib
ENTRYPOINT ["bench-entrypoint"]
