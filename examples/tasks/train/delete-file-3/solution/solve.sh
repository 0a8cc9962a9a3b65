#!/bin/bash
rm cup.txt
