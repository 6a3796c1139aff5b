"""What a mangled and a demangled name say."""

import pytest

from flashmoe_tools.audit.binutils import demangle
from flashmoe_tools.audit.names import canonical_types, explain, is_torch, qualified_name, root, template_arguments


@pytest.mark.parametrize(
    ("mangled", "outermost", "torch"),
    [
        ("_ZN8flashmoe1fIN3c104HalfEEEvv", "flashmoe", False),
        ("_ZNK3c1010TensorImpl4sizeEv", "c10", True),
        ("_ZN2at15get_num_threadsEv", "at", True),
        ("_ZTVN5torch8autograd4NodeE", "torch", True),
        ("_ZTIN3c105ErrorE", "c10", True),
        ("_ZGVZN2at3fooEvE1x", "at", True),
        ("_ZThn16_N2at6TensorD1Ev", "at", True),
        ("_ZZN3c104impl3fooEvE1s", "c10", True),
        ("_ZNSt6vectorIN2at6TensorESaIS1_EE9push_backEOS1_", "std", False),
        ("_ZSt4cout", "std", False),
        ("_Z6launchPf", "launch", False),
        ("_Znwm", "_Znwm", False),
        ("aoti_torch_get_dim", "aoti_torch_get_dim", False),
    ],
)
def test_owner(mangled: str, outermost: str, torch: bool) -> None:
    assert (root(mangled), is_torch(mangled)) == (outermost, torch)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void flashmoe::f<__half>(__half*, int)", "flashmoe::f"),
        ("std::vector<at::Tensor> flashmoe::g(std::function<void (int)> const&)", "flashmoe::g"),
        ("flashmoe::A<int>::run(int) const", "flashmoe::A::run"),
        ("vtable for flashmoe::A<int>", "flashmoe::A"),
        ("(anonymous namespace)::helper(int)", "{anonymous}::helper"),
        ("flashmoe::A::operator()(int) const", "flashmoe::A::operator_call"),
        ("flashmoe::operator<(flashmoe::A const&, flashmoe::A const&)", "flashmoe::operator_lt"),
        ("launch", "launch"),
    ],
)
def test_qualified_name(name: str, expected: str) -> None:
    assert qualified_name(name) == expected


def test_types_that_are_the_same_bits() -> None:
    assert canonical_types("void f<c10::Half>(c10::Half*)") == canonical_types("void f<__half>(__half*)")
    assert canonical_types("void f<c10::BFloat16>()") == canonical_types("void f<__nv_bfloat16>()")
    assert canonical_types("void f<c10::Half>()") != canonical_types("void f<c10::BFloat16>()")
    assert canonical_types("void f<HalfPrecision>()") == "void f<HalfPrecision>()"


def test_template_arguments() -> None:
    assert template_arguments("void a::f<a::Spec<__half, 64>, true>(int)") == "a::Spec<__half, 64>, true"
    assert template_arguments("void a::f(int)") == ""


def test_unrelated_names_are_no_near_miss() -> None:
    assert explain("void a::f<int>(int)", ["void a::g<int>(int)", "void b::f<int>(int)"]) is None


def test_demangle_keeps_the_order_and_c_names() -> None:
    assert demangle(["launch", "_Z6launchPf", "_ZN2at15get_num_threadsEv"]) == {
        "launch": "launch",
        "_Z6launchPf": "launch(float*)",
        "_ZN2at15get_num_threadsEv": "at::get_num_threads()",
    }
