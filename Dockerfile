# The images of flashmoe: base -> toolchain -> build -> test, and bench. `nox -s image` builds them; so does plain
# `DOCKER_BUILDKIT=1 docker build --target bench .` in a clone. docs/containers.md lists sizes and times.
#
# Nothing comes from a moving archive: the bases are digests (`nox -s image_pins` rewrites them), everything else comes
# from lockfiles/ by hash. No package is installed by apt. A base must contain Python 3.10 to 3.12 with venv, and for
# the build stages g++ and git. If no registry can be reached, `nox -s base_image` makes a base from Debian packages;
# pass it as BASE_BUILD and BASE_RUN.

ARG BASE_BUILD=python:3.12-bookworm@sha256:80f5d259a5969c86f6c92145d572de4a68c68e0edd28d4367dec0fb411b42af3
ARG BASE_RUN=python:3.12-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254
ARG COMPILED=scratch

# ---- compiled: units that the build stage need not compile, as entries of its cache. Empty, except in .ci/images, which withholds a sample.
FROM ${COMPILED} AS compiled

# ---- base: an unprivileged user and a work folder
FROM ${BASE_BUILD} AS base
RUN useradd --create-home --uid 10001 flashmoe && install -d -o flashmoe -g flashmoe /home/flashmoe/src
USER 10001
WORKDIR /home/flashmoe/src
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 UV_NO_PROGRESS=1

# ---- toolchain: the locked environments for compiling, testing and timing
FROM base AS toolchain
# Only what an environment depends on: editing a kernel does not install torch again.
COPY --chown=flashmoe:flashmoe nox noxfile.py pyproject.toml ./
COPY --chown=flashmoe:flashmoe lockfiles lockfiles
COPY --chown=flashmoe:flashmoe docker/with-network docker/with-network
COPY --chown=flashmoe:flashmoe flashmoe/__init__.py flashmoe/_path.py flashmoe/_version.py flashmoe/errors.py flashmoe/
COPY --chown=flashmoe:flashmoe flashmoe_tools/__init__.py flashmoe_tools/progress.py flashmoe_tools/
COPY --chown=flashmoe:flashmoe flashmoe_build/__init__.py flashmoe_build/
COPY --chown=flashmoe:flashmoe flashmoe_build/environments flashmoe_build/environments
# One layer, which contains uv's cache until its end: the three environments are hard links to the same 7 GB. A cache
# mount is another file system, so each environment would be a separate copy (21 GB, three times the minutes),
# as would an environment that a later layer adds. The bench image by itself does not need "test" here.
ARG ENVIRONMENTS="build test bench"
# hadolint ignore=SC2086
RUN --mount=type=secret,id=ca,uid=10001 --mount=type=secret,id=index,uid=10001 \
    docker/with-network ./nox -s environments -- ${ENVIRONMENTS} && rm -rf /home/flashmoe/.cache

# ---- build: the wheel, with its symbols and resources checked
FROM toolchain AS build
ARG FLASHMOE_ARCHS=all
COPY --chown=flashmoe:flashmoe . .
# Entries are keyed by content and by the compiler's hash; `nox -s reproduce` compares a cached build with one from nothing.
RUN --mount=type=cache,target=/home/flashmoe/compiled,uid=10001,gid=10001 \
    --mount=type=bind,from=compiled,target=/home/flashmoe/given \
    cp -r /home/flashmoe/given/. /home/flashmoe/compiled && \
    FLASHMOE_CACHE_DIR=/home/flashmoe/compiled ./nox -s build symbols && sha256sum dist/*.whl

# ---- test: the suite against the wheel of the build stage
FROM build AS test
ARG REVISION=unknown
LABEL org.opencontainers.image.title="flashmoe-test" \
      org.opencontainers.image.revision="${REVISION}"
ENTRYPOINT ["docker/test-entrypoint"]

# ---- runtime: the benchmark's environment without what only compilers need; includes bytecode (the root may be read-only)
FROM toolchain AS runtime
RUN rm -rf .nox/env/build-* .nox/env/test-* .nox/env/*.lock && \
    find .nox/env/bench-* -name '*.a' -delete && \
    find .nox/env/bench-* -type d -name include -path '*/site-packages/*' -prune -exec rm -rf {} +

# ---- bench: `mkdir -p results; docker run --rm [--gpus all] --user "$(id -u):$(id -g)" -v "$PWD/results:/results" flashmoe-bench`
FROM ${BASE_RUN} AS bench
RUN useradd --create-home --uid 10001 flashmoe && install -d -o flashmoe -g flashmoe -m 0777 /results
COPY --from=runtime --chown=root:root /home/flashmoe/src/.nox/env /home/flashmoe/src/.nox/env
COPY --chown=root:root docker/bench-entrypoint /usr/local/bin/bench-entrypoint
COPY --from=build --chown=root:root /home/flashmoe/src/dist /opt/flashmoe/dist
# A link to the folder, not to the interpreter: an interpreter finds its environment next to the path by which it was called.
RUN ln -s /home/flashmoe/src/.nox/env/bench-* /opt/flashmoe/env && \
    site="$(/opt/flashmoe/env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
    /opt/flashmoe/env/bin/python -m zipfile -e /opt/flashmoe/dist/*.whl "$site" && \
    /opt/flashmoe/env/bin/python -m compileall -q --invalidation-mode unchecked-hash "$site/flashmoe"
ARG REVISION=unknown
ARG VERSION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="flashmoe-bench" \
      org.opencontainers.image.description="Times flashmoe's attention kernels against torch's own" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 10001
WORKDIR /results
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 MPLCONFIGDIR=/tmp/matplotlib TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor
ENTRYPOINT ["bench-entrypoint"]
