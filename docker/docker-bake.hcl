# `docker buildx bake -f docker/docker-bake.hcl`: the images of the Dockerfile with buildx; `nox -s image` needs no buildx.
# A test holds targets, arguments and default bases against the Dockerfile.

variable "FLASHMOE_ARCHS" { default = "all" }
variable "ENVIRONMENTS" { default = "build test bench" }
variable "REVISION" { default = "unknown" }
variable "VERSION" { default = "unknown" }
variable "SOURCE" { default = "unknown" }

group "default" {
  targets = ["test", "bench"]
}

target "common" {
  context = "."
  secret = ["id=ca,env=FLASHMOE_CA", "id=index,env=FLASHMOE_INDEX"]
  args = {
    FLASHMOE_ARCHS = FLASHMOE_ARCHS
    ENVIRONMENTS = ENVIRONMENTS
    REVISION = REVISION
    VERSION = VERSION
    SOURCE = SOURCE
  }
}

target "test" {
  inherits = ["common"]
  target = "test"
  tags = ["flashmoe-test:latest"]
}

target "bench" {
  inherits = ["common"]
  target = "bench"
  tags = ["flashmoe-bench:latest"]
}
