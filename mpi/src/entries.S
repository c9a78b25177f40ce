/*
 * The interposed calls. Each checks whether its first argument is a file of Forebay and jumps, with its arguments
 * unchanged, to the driver or to the MPI library. A native file's call pays for four instructions. Before the first
 * call, each slot of forebay_mpi_native leads to the chooser.
 */
#include "calls.h"

    .hidden forebay_mpi_first
    .hidden forebay_mpi_extent
    .hidden forebay_mpi_driver
    .hidden forebay_mpi_native
    .hidden forebay_mpi_choose
    .text

.macro entry name, index
    .globl \name
    .type \name, @function
    .p2align 4
\name:
    movq %rdi, %r11
    subq forebay_mpi_first(%rip), %r11
    cmpq forebay_mpi_extent(%rip), %r11
    jae 1f
    jmp *(forebay_mpi_driver + 8 * \index)(%rip)
1:  jmp *(forebay_mpi_native + 8 * \index)(%rip)
2:  movl $\index, %r11d
    jmp choose
    .size \name, . - \name
    .pushsection .data.rel, "aw", @progbits
    .quad 2b
    .popsection
.endm

    .pushsection .data.rel, "aw", @progbits
    .p2align 3
    .globl forebay_mpi_native
forebay_mpi_native:
    .popsection

/* Finds the MPI and its driver, then continues to the target of the call. The stack is 8 off a multiple of 16 here. */
choose:
    pushq %rdi
    pushq %rsi
    pushq %rdx
    pushq %rcx
    pushq %r8
    pushq %r9
    pushq %r11
    movq %r11, %rdi
    call forebay_mpi_choose
    movq %rax, %r11
    addq $8, %rsp
    popq %r9
    popq %r8
    popq %rcx
    popq %rdx
    popq %rsi
    popq %rdi
    jmp *%r11

#define BOTH(name) entry MPI_##name, __COUNTER__; entry PMPI_##name, __COUNTER__;
#define LARGE(name) BOTH(name##_c)
#define ONE(name) entry name, __COUNTER__;
    FOREBAY_ALWAYS(BOTH)
    FOREBAY_ON_FILE(BOTH)
    FOREBAY_COUNTED(LARGE)
    LARGE(File_get_type_extent)
    LARGE(Register_datarep)
    FOREBAY_FORTRAN(ONE)
    FOREBAY_FORTRAN_DATAREP(ONE)

    .section .note.GNU-stack, "", @progbits
